"""One optimiser batch: forward, loss, backward over micro-batches, clip, step. The same on one rank and on many.

Called by trainer.py with a batch that rank 0 prepared (batch.py), and by anything that wants the same step without
processes. The loss weights were computed over the whole global batch, gradients are summed over ranks, and so the result
does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithm import Algorithm
from asyncrl.config import Config
from asyncrl.losses import diagnostics
from asyncrl.training.batch import MicroBatch, Sequences, micro_batches
from asyncrl.training.model import Policy, reshard
from asyncrl.training.optimizer import apply_gradients, learning_rate, make_optimizer
from asyncrl.training.ranks import Ranks
from asyncrl.training.totals import Totals

Reference = Callable[[MicroBatch], Tensor]
"""Log-probabilities of the reference policy, fp32 (T,); see reference.py."""


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
        flex = self.policy.kind == "flex"
        minibatches = micro_batches(sequences, config=self.config, ranks=self.ranks, flex=flex)
        minibatches = self._before(minibatches)
        totals = Totals()
        for minibatch in minibatches:
            for index, micro in enumerate(minibatch):
                self.policy.set_is_last_backward(index == len(minibatch) - 1)
                self.accumulate(micro, totals)
            self._apply(totals, step)
        return self._report(totals.over_ranks(self.ranks), step)

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
        self._count(totals, micro, logprobs_T.detach(), entropy_T.detach(), loss.detach(), metrics)

    @torch.no_grad()
    def _before(self, minibatches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """What the loss needs from before the first optimiser step of the batch: prox, ref, statistics."""
        flat = [micro for minibatch in minibatches for micro in minibatch]
        if self.reference is not None and self.needs.reference:
            flat = [replace(m, batch=replace(m.batch, reference_T=self.reference(m))) for m in flat]
        if self.needs.proximal or self.needs.statistics:
            logprobs = [self.policy(m.inputs, temperature=self.algo.temperature)[0] for m in flat]
            reshard(self.policy)
            if self.needs.proximal:
                pairs = zip(flat, logprobs, strict=True)
                flat = [replace(m, batch=replace(m.batch, proximal_T=own)) for m, own in pairs]
            if self.needs.statistics:
                statistics = self._statistics(flat, logprobs)
                flat = [replace(m, batch=replace(m.batch, statistics=statistics)) for m in flat]
        rest = iter(flat)
        return [[next(rest) for _ in minibatch] for minibatch in minibatches]

    def _statistics(self, micros: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
        totals = Totals()
        for micro, logprobs_T in zip(micros, logprobs, strict=True):
            if len(logprobs_T):
                for name, value in self.algo.statistics(logprobs_T, micro.batch).items():
                    totals.add(name, value)
        sums = totals.over_ranks(self.ranks).sums
        return {name: value.to(self.ranks.device) for name, value in sums.items()}

    def _apply(self, totals: Totals, step: int) -> None:
        training = self.config.training
        rate = learning_rate(training, step)
        norm, taken = apply_gradients(self.policy, self.optimizer, rate=rate, max_norm=training.max_grad_norm)
        first = self.ranks.is_first  # the norm is global already
        totals.add("optimizer_steps", float(first))
        totals.add("skipped", float(first and not taken))
        totals.highest("grad_norm", norm)

    def _count(
        self,
        totals: Totals,
        micro: MicroBatch,
        logprobs_T: Tensor,
        entropy_T: Tensor,
        loss: Tensor,
        metrics: dict[str, Tensor],
    ) -> None:
        with torch.no_grad():
            totals.add("loss", loss)
            totals.add("tokens", float(len(logprobs_T)))
            totals.add("computed", float(micro.num_tokens))
            totals.add("entropy", entropy_T.double().sum())
            for name, value_T in metrics.items():
                totals.add(f"algo/{name}", value_T.double().sum())
            for name, value in diagnostics.sums(logprobs_T, micro.batch).items():
                totals.add(f"diagnostics/{name}", value)
            totals.highest("ratio", (logprobs_T - micro.batch.behaviour_T).double().max())
            if micro.batch.reference_T is not None:
                totals.add("kl_ref", (logprobs_T - micro.batch.reference_T).double().sum())

    def _report(self, totals: Totals, step: int) -> dict[str, float]:
        tokens = max(totals.number("tokens"), 1.0)
        steps = max(totals.number("optimizer_steps"), 1.0)
        row = {
            "loss": totals.number("loss") / steps,
            "tokens/trained": totals.number("tokens"),
            "tokens/computed": totals.number("computed"),
            "policy/entropy": totals.number("entropy") / tokens,
            "policy/grad_norm": float(totals.maxima["grad_norm"]),
            "optimizer/learning_rate": learning_rate(self.config.training, step),
            "optimizer/skipped": totals.number("skipped"),
        }
        if "ratio" in totals.maxima:
            row["ratio/max"] = float(totals.maxima["ratio"].clamp(-20, 20).exp())
            prefix = "diagnostics/"
            parts = {n.removeprefix(prefix): v for n, v in totals.sums.items() if n.startswith(prefix)}
            row |= diagnostics.report(parts)
        if "kl_ref" in totals.sums:
            row["policy/kl_ref"] = totals.number("kl_ref") / tokens
        row |= {n.removeprefix("algo/"): float(v) / tokens for n, v in totals.sums.items() if n.startswith("algo/")}
        return row
