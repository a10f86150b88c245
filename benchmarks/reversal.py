"""Token reversal with a forced lag: the task, the queue and the training step of many policies at once.

Used by `staleness.py`, which chooses the cells and reads the curves. Each step samples from the current policies into a
queue and trains on the batch sampled D steps ago; in the first D steps on batches of the initial policy, so a token's
lag is min(step, D). Losses, advantages and weights come from `asyncrl`, not from copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from stacked import Shape, StackedAdam, forward, init_parameters
from torch import Tensor

from asyncrl.algorithm import Algorithm
from asyncrl.losses.advantages import NEED_A_GROUP
from asyncrl.losses.aggregation import token_weights
from asyncrl.types import Batch

ROW_WISE = NEED_A_GROUP - {"batch_norm"} | {"raw"}
"""Advantage estimators that look at one group at a time, so that many models can share a call."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Write `length` symbols backwards: `prompts` prompts times `group` responses a step."""

    symbols: int = 6
    length: int = 3
    prompts: int = 32
    group: int = 8

    @property
    def shape(self) -> Shape:
        """The policy: the separator after the prompt is one more symbol, which is never a right answer."""
        return Shape(vocab=self.symbols + 1, outputs=self.symbols, positions=2 * self.length)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    algorithm: str
    reward: str
    depth: int
    lr: float
    seed: int


@dataclass(kw_only=True)
class Rollout:
    """Responses of every model: (M, B, ...)."""

    prompts: Tensor
    responses: Tensor
    logprobs: Tensor
    rewards: Tensor
    exact: Tensor


class Stack:
    """All runs of some cells, sorted by algorithm; `algorithms` by label, `minibatches` optimiser steps per batch."""

    def __init__(
        self, cells: list[Cell], algorithms: dict[str, Algorithm], *, task: Task, minibatches: int, device: str
    ) -> None:
        self.cells, self.task, self.minibatches, self.device = cells, task, minibatches, device
        self.parameters = init_parameters(task.shape, [c.seed for c in cells], device)
        self.optimiser = StackedAdam(self.parameters)
        self.depth_M = torch.tensor([c.depth for c in cells], device=device)
        self.by_depth = {d: (self.depth_M == d).nonzero().flatten() for d in sorted({c.depth for c in cells})}
        self.lr_M = torch.tensor([c.lr for c in cells], device=device)
        self.dense_M = torch.tensor([c.reward == "dense" for c in cells], device=device)
        seeds = sorted({c.seed for c in cells})
        self.prompt_rngs = [torch.Generator().manual_seed(1000 + s) for s in seeds]
        self.seed_M = torch.tensor([seeds.index(c.seed) for c in cells])
        self.rng = torch.Generator(device).manual_seed(17)
        self.spans = [(algorithms[label], span) for label, span in _spans([c.algorithm for c in cells])]
        self.queue: list[Rollout] = []

    @torch.no_grad()
    def rollout(self, batches: int = 1) -> Rollout:
        """Fresh prompts, a group of responses each from every model's current policy."""
        task, size = self.task, (batches * self.task.prompts, self.task.length)
        by_seed = torch.stack([torch.randint(task.symbols, size, generator=g) for g in self.prompt_rngs])
        prompts = by_seed[self.seed_M].repeat_interleave(task.group, dim=1).to(self.device)
        separator = torch.full_like(prompts[:, :, :1], task.symbols)
        token, cache, drawn, logprobs = torch.cat([prompts, separator], dim=2), None, [], []
        for _ in range(task.length):
            logits, cache = forward(self.parameters, task.shape, token, cache=cache)
            logp = logits[:, :, 0].log_softmax(-1)
            noise = torch.empty_like(logp).exponential_(generator=self.rng)
            token = (logp.exp() / noise).argmax(-1, keepdim=True)
            drawn.append(token)
            logprobs.append(logp.gather(-1, token))
        responses = torch.cat(drawn, dim=2)
        hits = (responses == prompts.flip(2)).float()
        exact = hits.prod(2)
        rewards = torch.where(self.dense_M[:, None], hits.mean(2), exact)
        return Rollout(
            prompts=prompts, responses=responses, logprobs=torch.cat(logprobs, dim=2), rewards=rewards, exact=exact
        )

    def fill(self) -> None:
        """The first D batches come from the initial policy."""
        self.queue = [self.rollout() for _ in range(int(self.depth_M.max()))]

    def step(self, step: int) -> dict[str, Tensor]:
        """Sample a batch, train on the one from D steps ago; per-model curves, (M,) each."""
        fresh = self.rollout()
        self.queue.append(fresh)
        stale = self._delayed()
        self.queue = self.queue[-max(int(self.depth_M.max()), 1) :]
        lag_M = self.depth_M.clamp(max=step)
        advantages = self._advantages(stale.rewards)
        proximal = self._logprobs(stale, slice(None))[0].detach() if self._needs_proximal() else None
        curves: dict[str, Tensor] = {"success": fresh.exact.mean(1)}
        rows = self.task.prompts * self.task.group // self.minibatches
        for i in range(self.minibatches):
            part = slice(i * rows, (i + 1) * rows)
            curves |= self._update(stale, part, advantages, proximal, lag_M)
        return curves

    def _delayed(self) -> Rollout:
        """Each model's batch of `depth` steps ago."""
        parts = {}
        for name in ("prompts", "responses", "logprobs", "rewards", "exact"):
            out = torch.empty_like(getattr(self.queue[-1], name))
            for depth, chosen in self.by_depth.items():
                out[chosen] = getattr(self.queue[len(self.queue) - 1 - depth], name)[chosen]
            parts[name] = out
        return Rollout(**parts)

    def _advantages(self, rewards: Tensor) -> Tensor:
        """(M, B) -> (M, B): each algorithm's own estimator on its models' rewards."""
        grouped = rewards.double().cpu().numpy().reshape(len(self.cells), -1, self.task.group)
        out = np.empty_like(grouped)
        for algo, span in self.spans:
            if algo.advantage in ROW_WISE:
                rows = grouped[span].reshape(-1, self.task.group)
                out[span] = algo.advantages(rows).reshape(grouped[span].shape)
            else:
                out[span] = np.stack([algo.advantages(r) for r in grouped[span]])
        return torch.from_numpy(out.reshape(rewards.shape)).to(rewards)

    def _needs_proximal(self) -> bool:
        return any(algo.needs().proximal for algo, _ in self.spans)

    def _logprobs(self, data: Rollout, part: slice) -> tuple[Tensor, Tensor]:
        """Log-probabilities (M, B, L) of the responses under the current policies, and the entropy per model."""
        prompts, responses = data.prompts[:, part], data.responses[:, part]
        separator = torch.full_like(prompts[:, :, :1], self.task.symbols)
        tokens = torch.cat([prompts, separator, responses[:, :, :-1]], dim=2)
        logp = forward(self.parameters, self.task.shape, tokens, last=self.task.length)[0].log_softmax(-1)
        entropy_M = -(logp.detach().exp() * logp.detach()).sum(-1).mean((1, 2))
        return logp.gather(-1, responses.unsqueeze(-1)).squeeze(-1), entropy_M

    def _update(
        self, data: Rollout, part: slice, advantages: Tensor, proximal: Tensor | None, lag_M: Tensor
    ) -> dict[str, Tensor]:
        """One optimiser step of every model."""
        logprobs, entropy_M = self._logprobs(data, part)
        total, clipped = logprobs.new_zeros(()), torch.zeros(len(self.cells), device=self.device)
        behaviour = data.logprobs[:, part]
        prox = behaviour if proximal is None else proximal[:, part]
        log_w = (logprobs.detach() - behaviour).clamp(-20, 20)
        ess_M = _ess(log_w.flatten(1).exp())
        ess_sequence_M = _ess(log_w.sum(2).clamp(-20, 20).exp())
        lr_M = self.lr_M.clone()
        for algo, span in self.spans:
            inputs = (behaviour[span], prox[span], advantages[span, part], data.rewards[span, part], lag_M[span])
            loss, fraction = _losses(algo, logprobs[span], *inputs)
            total = total + loss
            clipped[span] = fraction
            if algo.ess_lr is not None:
                factors = [algo.lr_scale({"ratio/ess_sequence": e}) for e in ess_sequence_M[span].tolist()]
                lr_M[span] *= torch.tensor(factors, device=self.device)
        total.backward()
        self.optimiser.step(lr_M, max_norm=1.0)
        return {"entropy": entropy_M, "ess": ess_M, "ess_sequence": ess_sequence_M, "clipped": clipped}


def steps_to(success: np.ndarray, level: float, window: int = 5) -> int | None:
    """First step at which the mean success of the last `window` steps reaches `level`; None if it never does."""
    smooth = np.convolve(success, np.ones(window) / window, mode="valid")
    reached = np.flatnonzero(smooth >= level)
    return int(reached[0]) + window if len(reached) else None


def _ess(weights: Tensor) -> Tensor:
    """(M, N) raw weights -> effective sample size of each row as a share."""
    return weights.sum(1).square() / (weights.shape[1] * weights.square().sum(1))


def _losses(algo: Algorithm, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of the models of one algorithm, added up, and each one's share of clipped tokens.

    Losses are per token, so the models share a call as if they were one batch; only what an algorithm asks to know of
    its whole batch (`statistics`) keeps them apart, by `vmap`.
    """
    if algo.needs().statistics:
        losses_M, shares_M = torch.vmap(lambda *one: _loss_of(algo, *(t[None] for t in one)))(*tensors)
        return losses_M.sum(), shares_M[:, 0]
    return _loss_of(algo, *tensors)


def _loss_of(
    algo: Algorithm, logprobs: Tensor, behaviour: Tensor, prox: Tensor, advantages: Tensor, rewards: Tensor, lag: Tensor
) -> tuple[Tensor, Tensor]:
    """(m, B, L) tokens, (m, B) responses, (m,) lags, as one batch."""
    models, rows, length = logprobs.shape
    weight = float(token_weights(algo.aggregation, np.full(rows, length), length)[0])
    sequence_T = torch.arange(models * rows, device=logprobs.device).repeat_interleave(length)
    flat = logprobs.flatten()
    batch = Batch(
        behaviour_T=behaviour.flatten(),
        proximal_T=prox.flatten(),
        advantages_T=_repeat(advantages, length),
        rewards_T=_repeat(rewards, length),
        lags_T=_repeat(lag, rows * length),
        sequence_T=sequence_T,
        num_sequences=models * rows,
        weights_T=torch.full_like(sequence_T, weight, dtype=logprobs.dtype),
    )
    if algo.needs().statistics:
        batch.statistics = algo.statistics(flat.detach(), batch)
    loss_T, metrics = algo.loss(flat, batch)
    clips = [v for k, v in metrics.items() if k.startswith("clip/") or k == "correction/rejected"]
    share_T = torch.stack(clips).amax(0) if clips else torch.zeros_like(loss_T)
    return (loss_T * batch.weights_T).sum(), share_T.detach().view(models, -1).mean(1)


def _repeat(values: Tensor, times: int) -> Tensor:
    """Each value `times` in a row, flat."""
    return values.unsqueeze(-1).expand(*values.shape, times).flatten()


def _spans(labels: list[str]) -> Iterator[tuple[str, slice]]:
    """Runs of equal labels."""
    start = 0
    for label, group in groupby(labels):
        size = len(list(group))
        yield label, slice(start, start + size)
        start += size
