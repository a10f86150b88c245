"""One optimiser batch: forward, loss, backward over micro-batches, clip, step. The same on one rank and on many.

Called by trainer.py with a batch that rank 0 prepared (batch.py), and by anything that wants the same step without
processes. The loss weights were computed over the whole global batch and gradients are summed over ranks, so the
result does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithm import Algorithm
from asyncrl.config import Config
from asyncrl.losses import diagnostics
from asyncrl.losses.tokens import LOG_BOUND
from asyncrl.training.batch import MicroBatch, Sequences, micro_batches
from asyncrl.training.model import Policy, expect_backward, reshard
from asyncrl.training.optimizer import apply_gradients, learning_rate, make_optimizer
from asyncrl.training.ranks import Ranks
from asyncrl.training.totals import Totals

Reference = Callable[[Sequence[MicroBatch]], Iterator[Tensor]]
"""A batch's micro-batches -> log-probabilities of the reference policy, fp32 (T,) each, in order; see reference.py.
Called before the batch's first optimiser step; a result may still be on its way when the call returns."""


class Learner:
    """A policy, its optimiser and an algorithm on this rank. All methods are collective over the ranks."""

    def __init__(
        self, *, policy: Policy, algo: Algorithm, config: Config, ranks: Ranks, reference: Reference | None = None
    ) -> None:
        self.policy, self.algo, self.config, self.ranks, self.reference = policy, algo, config, ranks, reference
        self.optimizer = make_optimizer(policy, config.training)
        self.needs = algo.needs()
        if self.needs.reference and reference is None:
            raise ValueError(f"{type(algo).__name__} needs a reference policy and none was given")

    def train(self, sequences: Sequences, *, step: int) -> dict[str, float]:
        """Train on one batch; returns metrics of the global batch, the same on all ranks.

        Everything random in a step depends on (seed, step, rank), so a resumed run draws what this one would have.
        """
        torch.manual_seed(hash((self.config.seed, step, self.ranks.rank)) & 0x7FFFFFFF)
        minibatches = micro_batches(sequences, config=self.config, ranks=self.ranks, kind=self.policy.kind)
        references = self.ask_reference(minibatches)
        batch_totals = Totals()
        for minibatch in self._before(minibatches):
            totals = Totals()
            for index, micro in enumerate(minibatch):
                expect_backward(self.policy, last=index == len(minibatch) - 1)
                self.accumulate(with_reference(micro, references), totals)
            totals = totals.over_ranks(self.ranks)
            self._apply(totals, step)
            batch_totals.merge(totals)
        return report(batch_totals)

    def accumulate(self, micro: MicroBatch, totals: Totals) -> None:
        """Forward and backward of one micro-batch; adds to the gradients and to the totals."""
        logprobs_T, entropy_T = self.policy(micro.inputs, temperature=self.algo.temperature, entropy=True)
        if not len(logprobs_T):  # nothing to train here; the other ranks' collectives need this pass all the same
            logprobs_T.sum().backward()
            return
        assert entropy_T is not None
        batch = replace(micro.batch, entropy_T=entropy_T if self.needs.entropy else None)
        loss_T, metrics = self.algo.loss(logprobs_T, batch)
        if loss_T.shape != logprobs_T.shape:
            raise ValueError(
                f"{type(self.algo).__name__}.loss must return one value per token, {tuple(logprobs_T.shape)}, without "
                f"reducing; got shape {tuple(loss_T.shape)}"
            )
        loss = (loss_T * batch.weights_T).sum()
        if self.config.training.entropy_coef:
            loss = loss - self.config.training.entropy_coef * (entropy_T * batch.weights_T).sum()
        loss.backward()
        count(totals, micro, logprobs_T.detach(), entropy_T.detach(), loss.detach(), metrics)

    def ask_reference(self, minibatches: list[list[MicroBatch]]) -> Iterator[Tensor] | None:
        """The reference's answers for a batch, one per micro-batch in order; None when the loss needs none."""
        if self.reference is None or not self.needs.reference:
            return None
        return self.reference([micro for minibatch in minibatches for micro in minibatch])

    @torch.no_grad()
    def _before(self, minibatches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """What the loss needs of the policy from before the first optimiser step of the batch: prox, statistics."""
        flat = [micro for minibatch in minibatches for micro in minibatch]
        if self.needs.proximal or self.needs.statistics:
            logprobs = [self.policy(m.inputs, temperature=self.algo.temperature)[0] for m in flat]
            reshard(self.policy)
            if self.needs.proximal:
                pairs = zip(flat, logprobs, strict=True)
                flat = [replace(m, batch=replace(m.batch, proximal_T=own)) for m, own in pairs]
        rest = iter(flat)
        minibatches = [[next(rest) for _ in minibatch] for minibatch in minibatches]
        if self.needs.statistics:
            of_pass = iter(logprobs)
            minibatches = [self._with_statistics(m, [next(of_pass) for _ in m]) for m in minibatches]
        return minibatches

    def _with_statistics(self, minibatch: list[MicroBatch], logprobs: list[Tensor]) -> list[MicroBatch]:
        """Sums over one optimiser step's tokens on all ranks, handed to each of its micro-batches."""
        totals = Totals()
        for micro, logprobs_T in zip(minibatch, logprobs, strict=True):
            if len(logprobs_T):
                for name, value in self.algo.statistics(logprobs_T, micro.batch).items():
                    totals.add(name, value)
        sums = totals.over_ranks(self.ranks).sums
        statistics = {name: value.to(self.ranks.device) for name, value in sums.items()}
        return [replace(m, batch=replace(m.batch, statistics=statistics)) for m in minibatch]

    def _apply(self, totals: Totals, step: int) -> None:
        """One optimiser step with the gradients so far; adds what it did to the (global) totals.

        Nothing trained (every response masked) is no step: moments alone would move the weights.
        """
        training = self.config.training
        rate = learning_rate(training, step)
        if totals.number("tokens"):
            rate *= self.algo.lr_scale(report(totals))
            norm, taken = apply_gradients(self.policy, self.optimizer, rate=rate, max_norm=training.max_grad_norm)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            norm, taken = 0.0, False
        totals.add("optimizer_steps", 1.0)
        totals.add("skipped", float(not taken))
        totals.add("rate", rate)
        totals.highest("grad_norm", norm)


def with_reference(micro: MicroBatch, references: Iterator[Tensor] | None) -> MicroBatch:
    """The same with the next of the reference's answers; waits for it."""
    if references is None:
        return micro
    return replace(micro, batch=replace(micro.batch, reference_T=next(references)))


@torch.no_grad()
def count(
    totals: Totals, micro: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor, loss: Tensor, metrics: dict[str, Tensor]
) -> None:
    """Add one micro-batch to the totals."""
    totals.add("loss", loss)
    totals.add("tokens", float(len(logprobs_T)))
    totals.add("computed", float(micro.num_tokens))
    totals.add("entropy", entropy_T.double().sum())
    for name, value_T in metrics.items():
        totals.add(f"algo/{name}", diagnostics.by_lag(value_T, micro.batch.lags_T))
    for name, value in diagnostics.sums(logprobs_T, micro.batch).items():
        totals.add(f"diagnostics/{name}", value)
    totals.highest("log_ratio", (logprobs_T - micro.batch.behaviour_T).double().max())


def report(totals: Totals) -> dict[str, float]:
    """Global totals -> metrics: averages over all trained tokens; a name ending in `_by_lag/k` over those of lag k."""
    tokens, steps = max(totals.number("tokens"), 1.0), max(totals.number("optimizer_steps"), 1.0)
    row = {
        "loss": totals.number("loss") / steps,
        "tokens/trained": totals.number("tokens"),
        "tokens/computed": totals.number("computed"),
        "policy/entropy": totals.number("entropy") / tokens,
        "optimizer/learning_rate": totals.number("rate") / steps,
        "optimizer/skipped": totals.number("skipped"),
    }
    if "grad_norm" in totals.maxima:
        row["policy/grad_norm"] = float(totals.maxima["grad_norm"])
    if "log_ratio" not in totals.maxima:
        return row
    row["ratio/max"] = float(totals.maxima["log_ratio"].clamp(-LOG_BOUND, LOG_BOUND).exp())
    parts = _under("diagnostics/", totals)
    row |= diagnostics.report(parts)
    lags = parts["tokens"].nonzero().flatten().tolist()
    for name, by_lag in _under("algo/", totals).items():
        row[name] = float(by_lag.sum()) / tokens
        if len(lags) > 1:
            row |= {f"{name}_by_lag/{lag}": float(by_lag[lag] / parts["tokens"][lag]) for lag in lags}
    return row


def _under(prefix: str, totals: Totals) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in totals.sums.items() if name.startswith(prefix)}
