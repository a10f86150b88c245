"""Refuses combinations of stages that would not mean what they say: one line each, with the remedy.

Called by `Algorithm.check` at start-up, through `settings.check`. Pure: reads keys, raises ValueError, changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncrl.losses.advantages import NEED_A_GROUP, group_of_one
from asyncrl.losses.corrections import CORRECTIONS, WEIGHTS
from asyncrl.losses.objectives import OBJECTIVES, UNCORRECTED, WITHOUT_RATIO

if TYPE_CHECKING:
    from asyncrl.algorithm import Algorithm
    from asyncrl.config import ReplayConfig, TrainingConfig

LOSS_KEYS = (
    "objective",
    "anchor",
    "correction",
    "age_tightening",
    "self_normalise",
    "beta",
    "kl",
    "kl_in",
    "kl_unbiased",
)
"""Keys that a class with a `loss` of its own leaves without meaning."""


def check(algo: Algorithm, *, training: TrainingConfig, replay: ReplayConfig) -> None:
    """Raises ValueError for the first problem found."""
    for problem in problems(algo, training=training, replay=replay):
        raise ValueError(problem)


def problems(algo: Algorithm, *, training: TrainingConfig, replay: ReplayConfig) -> Iterator[str]:
    """Every reason to refuse, one line each."""
    yield from _ranges(algo)
    yield from _unused(algo)
    yield from _advantages(algo)
    if not writes_own_loss(algo):
        yield from _staleness(algo, asynchronous=replay.target_lag > 0)
        yield from _anchor(algo, training.minibatches)
        yield from _kl(algo)


def writes_own_loss(algo: Algorithm) -> bool:
    """True for a class that replaces the whole pipeline."""
    return _overrides(algo, "loss")


def writes_own_objective(algo: Algorithm) -> bool:
    """True for a class that replaces the objective and keeps the other stages."""
    return _overrides(algo, "surrogate")


def writes_own_advantages(algo: Algorithm) -> bool:
    """True for a class that computes advantages itself."""
    return _overrides(algo, "advantages")


def without_effect(algo: Algorithm) -> list[str]:
    """Keys of the stages that a class replaces, but for those that it declares itself, to use them there."""
    replaced = ["advantage"] if writes_own_advantages(algo) else []
    replaced += LOSS_KEYS if writes_own_loss(algo) else ["objective"] if writes_own_objective(algo) else []
    return [key for key in replaced if key not in _declared(algo)]


def forget_foreign_bounds(algo: Algorithm) -> None:
    """Under another objective or correction than the preset's, the preset's bounds give way to its defaults."""
    for stage, table in (("objective", OBJECTIVES), ("correction", CORRECTIONS)):
        chosen, preset = getattr(algo, stage), default(algo, stage)
        if chosen == preset or preset not in table:
            continue
        for key in stage_keys(table[preset]):
            if getattr(algo, key) == default(algo, key):
                setattr(algo, key, None)


def default(algo: Algorithm, key: str) -> Any:
    """The preset's value of a key."""
    return _defaults(type(algo))[key]


def stage_keys(stage: Callable[..., Any]) -> dict[str, Any]:
    """The hyperparameters of a stage and their defaults."""
    from asyncrl.losses.pipeline import stage_keys as keys  # pipeline imports the stages, as this module does

    return keys(stage)


def used_keys(algo: Algorithm) -> dict[str, Any]:
    """The bounds that the chosen stages use, with the values they will take."""
    used: dict[str, Any] = {}
    if not writes_own_loss(algo) and not writes_own_objective(algo):
        used |= stage_keys(OBJECTIVES[algo.objective])
    if not writes_own_loss(algo) and algo.correction != "none":
        used |= stage_keys(CORRECTIONS[algo.correction])
    if writes_own_loss(algo) or writes_own_objective(algo):
        used |= {key: None for key in all_stage_keys() if key in _declared(algo)}
    return {key: value if getattr(algo, key) is None else getattr(algo, key) for key, value in used.items()}


def all_stage_keys() -> dict[str, list[str]]:
    """Every bound, with the stages that use it."""
    users: dict[str, list[str]] = {}
    for name, stage in (OBJECTIVES | CORRECTIONS).items():
        for key in stage_keys(stage):
            users.setdefault(key, []).append(name)
    return users


def _overrides(algo: Algorithm, method: str) -> bool:
    from asyncrl.algorithm import Algorithm as Base  # the class imports this module

    return getattr(type(algo), method) is not getattr(Base, method)


def _declared(algo: Algorithm) -> frozenset[str]:
    """Keys that a class of a user's declares itself, to use them in a loss of its own."""
    return frozenset(inspect.get_annotations(type(algo)))


@cache
def _defaults(cls: type[Algorithm]) -> dict[str, Any]:
    import msgspec

    return {f.name: f.default for f in msgspec.structs.fields(cls)}


def _unused(algo: Algorithm) -> Iterator[str]:
    used = used_keys(algo)
    for key, users in all_stage_keys().items():
        value = getattr(algo, key)
        if key not in used and value is not None and value != default(algo, key):
            yield (
                f"algo.{key} is used by {', '.join(users)}, not by {_describe(algo)}: "
                f"leave it out or choose a stage that uses it"
            )
    for key in without_effect(algo):
        if getattr(algo, key) != default(algo, key):
            own = "a loss of its own" if writes_own_loss(algo) and key in LOSS_KEYS else "its own"
            yield f"algo.{key} has no effect: {type(algo).__name__} defines {own}; leave it out"
    if writes_own_loss(algo):
        return
    if algo.correction in ("none", "fade") and algo.age_tightening:
        yield (
            f"algo.age_tightening tightens a correction's bound, and correction {algo.correction!r} has none: set "
            "--algo.correction token_tis"
        )
    if algo.self_normalise and algo.correction not in WEIGHTS:
        yield (
            f"algo.self_normalise divides weights by their mean, and correction {algo.correction!r} gives no weights: "
            f"choose one of {', '.join(sorted(WEIGHTS))}"
        )
    if not algo.beta:
        for key in ("kl", "kl_in", "kl_unbiased"):
            if getattr(algo, key) != default(algo, key):
                yield f"algo.{key} shapes the KL penalty, and algo.beta is 0: set --algo.beta above 0"
    if not algo.overlong_buffer and algo.overlong_penalty != default(algo, "overlong_penalty"):
        yield "algo.overlong_penalty scales the overlong buffer, and algo.overlong_buffer is 0: set it in tokens"


def _describe(algo: Algorithm) -> str:
    if writes_own_loss(algo) or writes_own_objective(algo):
        return type(algo).__name__
    correction = "" if algo.correction == "none" else f" with correction {algo.correction!r}"
    return f"objective {algo.objective!r}{correction}"


def _advantages(algo: Algorithm) -> Iterator[str]:
    if writes_own_advantages(algo):
        return
    if algo.n_samples < 2 and algo.advantage in NEED_A_GROUP:
        yield group_of_one(algo.advantage)
    if algo.n_samples < 2 and algo.dynamic_sampling:
        yield "algo.dynamic_sampling drops groups of equal rewards, which is every group of one: set --algo.n_samples 2"
    if algo.advantage == "max_rl" and algo.overlong_buffer:
        yield "advantage 'max_rl' needs rewards of 0 and 1; the overlong penalty makes others: set overlong_buffer 0"


def _staleness(algo: Algorithm, *, asynchronous: bool) -> Iterator[str]:
    if writes_own_objective(algo):
        return
    two_policies = algo.anchor == "behaviour" and algo.objective not in WITHOUT_RATIO
    if two_policies and algo.correction in WEIGHTS:
        yield (
            f"objective {algo.objective!r} on the behaviour anchor already uses theta/mu, so correction "
            f"{algo.correction!r} would correct twice: set --algo.anchor proximal, or --algo.correction none"
        )
    if not asynchronous or algo.correction != "none":
        return
    if algo.objective in UNCORRECTED:
        yield (
            f"objective {algo.objective!r} does nothing about stale data and replay.target_lag is above 0: "
            "set --algo.correction token_tis, or --replay.target_lag 0"
        )
    elif algo.anchor != "behaviour" and algo.objective not in WITHOUT_RATIO:
        yield (
            f"anchor {algo.anchor!r} leaves prox/mu uncorrected and replay.target_lag is above 0: "
            "set --algo.correction token_tis, --algo.anchor behaviour, or --replay.target_lag 0"
        )


def _anchor(algo: Algorithm, minibatches: int) -> Iterator[str]:
    if algo.anchor == "behaviour":
        return
    if algo.objective in WITHOUT_RATIO and not writes_own_objective(algo):
        yield f"algo.anchor {algo.anchor!r}: objective {algo.objective!r} has no ratio; leave the anchor at behaviour"
    elif algo.anchor == "proximal" and algo.objective == "m2po" and not writes_own_objective(algo):
        yield (
            "objective 'm2po' reads its range off the ratio at the start of the batch, which on anchor 'proximal' is 1 "
            "for every token, so nothing is ever clipped: choose --algo.anchor behaviour"
        )
    elif algo.anchor == "proximal" and minibatches < 2:
        yield (
            "anchor 'proximal' with one optimiser step per batch: theta equals prox, the ratio is 1 and the clip never "
            "acts: set --training.minibatches 2 or more, or --algo.anchor interpolated"
        )


def _kl(algo: Algorithm) -> Iterator[str]:
    if not algo.beta:
        return
    if algo.kl == "k1" and algo.kl_in == "loss" and not algo.kl_unbiased:
        yield (
            "k1 as a loss has zero expected gradient: set --algo.kl k2, --algo.kl_in reward, or --algo.kl_unbiased true"
        )
    if algo.kl_in == "reward" and algo.kl not in (None, "k1"):
        yield f"in the reward only k1 gives the gradient of the KL, got {algo.kl!r}: leave --algo.kl out"
    if algo.kl_in == "reward" and algo.kl_unbiased:
        yield "algo.kl_unbiased weights the penalty in the loss, and --algo.kl_in is reward: leave it out"


_AT_LEAST = {
    "n_samples": 1,
    "clip_low": 0.0,
    "clip_high": 0.0,
    "dual_clip": 0.0,
    "weight_max": 1.0,
    "divergence": 0.0,
    "moment_budget": 0.0,
    "correction_cap": 1.0,
    "correction_low": 0.0,
    "correction_high": 1.0,
    "opsm_divergence": 0.0,
    "age_tightening": 0.0,
    "beta": 0.0,
    "overlong_buffer": 0,
    "overlong_penalty": 0.0,
}
_ABOVE_ZERO = ("temperature", "tau_positive", "tau_negative", "eta", "ess_lr", "fade_half_life")


def _ranges(algo: Algorithm) -> Iterator[str]:
    for key, least in _AT_LEAST.items():
        value = getattr(algo, key)
        if value is not None and not value >= least:
            yield f"algo.{key} must be at least {least}, got {value}"
    for key in _ABOVE_ZERO:
        value = getattr(algo, key)
        if value is not None and not value > 0:
            yield f"algo.{key} must be above 0, got {value}"
    if algo.clip_low is not None and algo.clip_low >= 1:
        yield f"algo.clip_low is a distance from 1 and must be below 1, got {algo.clip_low}"
    if algo.correction_low is not None and algo.correction_low > 1:
        yield f"algo.correction_low must be at most 1, so that fresh data is kept, got {algo.correction_low}"
    if algo.dual_clip and algo.dual_clip < 1:
        yield f"algo.dual_clip must be 0 (off) or at least 1, got {algo.dual_clip}"
    if algo.ess_lr is not None and algo.ess_lr > 1:
        yield f"algo.ess_lr is a share of the responses and must be at most 1, got {algo.ess_lr}"
