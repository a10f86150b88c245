"""The loss as stages: anchor -> ratios -> KL in the reward -> objective -> correction -> KL in the loss.

Called by `Algorithm.loss` for each micro-batch. Each stage is named by its own key of the algorithm and lives in its
own file. Nothing here reduces over tokens: the engine multiplies by `Batch.weights_T` and sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncrl.losses import kl, second_moment
from asyncrl.losses.corrections import CORRECTIONS, WEIGHTS
from asyncrl.losses.objectives import OBJECTIVES, WITHOUT_RATIO
from asyncrl.losses.tokens import Loss, Metrics, Tokens, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithm import Algorithm
    from asyncrl.types import Batch


@cache
def stage_keys(stage: Callable[..., Any]) -> dict[str, Any]:
    """The hyperparameters of a stage: its keyword-only parameters and their defaults."""
    parameters = inspect.signature(stage).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def call_stage(stage: Callable[..., Any], tokens: Tokens, algo: Algorithm) -> Any:
    """Run a stage with the algorithm's keys; a key that is None takes the stage's own default."""
    given = {name: getattr(algo, name) for name in stage_keys(stage)}
    return stage(tokens, **{name: value for name, value in given.items() if value is not None})


def make_tokens(algo: Algorithm, logprobs_T: Tensor, batch: Batch) -> Tokens:
    """The view of a micro-batch that the stages share; the anchor decides what its ratios mean."""
    detached_T = logprobs_T.detach()
    anchor_T = anchor(algo.anchor, detached_T, batch)
    log_stale_T = log_ratio(detached_T, batch.behaviour_T)
    two_policies = algo.anchor == "behaviour" or algo.objective in WITHOUT_RATIO
    return Tokens(
        logprobs_T=logprobs_T,
        anchor_T=anchor_T,
        log_ratio_T=log_ratio(logprobs_T, anchor_T),
        log_stale_T=log_stale_T,
        log_weight_T=log_stale_T if two_policies else log_ratio(anchor_T, batch.behaviour_T),
        advantages_T=batch.advantages_T,
        rewards_T=batch.rewards_T,
        lags_T=batch.lags_T,
        sequence_T=batch.sequence_T,
        num_sequences=batch.num_sequences,
        statistics=batch.statistics,
        age_tightening=algo.age_tightening,
    )


def anchor(name: str, detached_T: Tensor, batch: Batch) -> Tensor:
    """log of the policy that the objective's ratio is taken to.

    behaviour      mu, recorded at sampling: two policies, no extra forward pass
    proximal       the weights at the start of the batch: three policies (AReaL, 2505.24298)
    interpolated   log mu + a (log theta - log mu), a = lag / (lag + 1): three without the pass (A-3PO, 2512.06547)
    """
    if name == "behaviour":
        return batch.behaviour_T
    if name == "proximal":
        if batch.proximal_T is None:
            raise RuntimeError("anchor 'proximal' needs Batch.proximal_T, which the engine did not fill")
        return batch.proximal_T
    lags_T = batch.lags_T.to(detached_T.dtype)
    return batch.behaviour_T + lags_T / (lags_T + 1.0) * log_ratio(detached_T, batch.behaviour_T)


def loss(algo: Algorithm, logprobs_T: Tensor, batch: Batch) -> Loss:
    """All stages: loss per token (T,) and metrics per token."""
    tokens = make_tokens(algo, logprobs_T, batch)
    shaped = tokens
    if algo.beta and algo.kl_in == "reward":
        shaping_T = kl.reward_to_go(logprobs_T, _reference(batch), batch.sequence_T, batch.num_sequences)
        shaped = replace(tokens, advantages_T=tokens.advantages_T - algo.beta * shaping_T)
    loss_T, metrics = _returned(algo.surrogate(shaped), algo)
    refuse_other_metrics(metrics, logprobs_T, algo)
    if algo.correction != "none":
        weight_T = correction(algo, tokens)
        loss_T = loss_T * weight_T
        metrics = metrics | {"correction/weight": weight_T, "correction/rejected": (weight_T == 0).to(weight_T.dtype)}
    if algo.beta:
        loss_T, metrics = _add_kl(algo, loss_T, metrics, logprobs_T, batch)
    return loss_T, {name: value.detach() for name, value in metrics.items()}


def _returned(value: Any, algo: Algorithm) -> Loss:
    """What a class's own `surrogate` returned, if that is what it should be."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return value
    raise ValueError(
        f"{type(algo).__name__}.surrogate must return a loss per token and a dict of metrics, `return loss_T, {{}}`; "
        f"got {type(value).__name__}"
    )


def refuse_other_metrics(metrics: Metrics, logprobs_T: Tensor, algo: Algorithm) -> None:
    """Raise ValueError for a metric that is no value per token: its mean would depend on how the batch was cut."""
    for name, value in metrics.items():
        shape = tuple(getattr(value, "shape", ()))
        if shape != tuple(logprobs_T.shape):
            raise ValueError(
                f"{type(algo).__name__}: metric {name!r} must be a tensor of one value per token, "
                f"{tuple(logprobs_T.shape)}, without reducing; got {type(value).__name__} of shape {shape}"
            )


def objective(algo: Algorithm, tokens: Tokens) -> Loss:
    """The objective that `algo.objective` names."""
    return call_stage(OBJECTIVES[algo.objective], tokens, algo)


def correction(algo: Algorithm, tokens: Tokens) -> Tensor:
    """The weight per token that `algo.correction` names, divided by its batch mean under `self_normalise`."""
    weight_T = call_stage(CORRECTIONS[algo.correction], tokens, algo)
    if not algo.self_normalise:
        return weight_T
    total, count = tokens.statistics["correction/sum"], tokens.statistics["correction/count"]
    return weight_T * (count / total.clamp(min=1e-8))


def statistics(algo: Algorithm, logprobs_T: Tensor, batch: Batch) -> dict[str, Tensor]:
    """What the chosen stages must know of the whole global batch, as sums."""
    tokens = make_tokens(algo, logprobs_T.detach(), batch)
    sums: dict[str, Tensor] = {}
    if algo.objective == "m2po":
        sums |= second_moment.histogram(tokens.log_ratio_T, tokens.advantages_T)
    if algo.self_normalise and algo.correction in WEIGHTS:
        weight_T = call_stage(CORRECTIONS[algo.correction], tokens, algo)
        sums |= {"correction/sum": weight_T.sum(), "correction/count": weight_T.new_ones(weight_T.shape).sum()}
    return sums


def _add_kl(algo: Algorithm, loss_T: Tensor, metrics: Metrics, logprobs_T: Tensor, batch: Batch) -> Loss:
    reference_T = _reference(batch)
    metrics = metrics | {"policy/kl_ref": kl.estimate("k3", logprobs_T.detach(), reference_T)}
    if algo.kl_in == "reward":
        return loss_T, metrics
    estimator = algo.kl or "k2"
    penalty_T = kl.penalty(estimator, logprobs_T, reference_T, batch.behaviour_T, unbiased=algo.kl_unbiased)
    return loss_T + algo.beta * penalty_T, metrics


def _reference(batch: Batch) -> Tensor:
    if batch.reference_T is None:
        raise RuntimeError("beta > 0 needs Batch.reference_T, which the engine did not fill")
    return batch.reference_T
