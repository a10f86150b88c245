"""What an algorithm is: hyperparameters, advantages, which groups to keep, and a loss per token.

An algorithm is one file in `algos/` (or anywhere a user likes) with one class. Its fields are the `algo` section of the
configuration and the `--help` text. It never mentions a process, a rank or a micro-batch: the engine weights its
per-token values over the whole global batch and sums them. No torch import at module level here or in `algos/`: tensors
are used through their methods, so that `asyncrl algos` is instant.

A named algorithm is a preset of stages, each with its own key; the stages are pure functions in `asyncrl/losses/`. To
write your own, subclass once and override the stage that differs: `surrogate` (the objective alone), `advantages`,
`reward`, `keep`, or `loss` as a whole. docs/algorithms.md walks through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from asyncrl.losses import advantages as advantage_estimators
from asyncrl.losses import checks, pipeline
from asyncrl.losses.advantages import Advantage
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.corrections import CorrectionName
from asyncrl.losses.kl import Estimator
from asyncrl.losses.objectives import ObjectiveName
from asyncrl.losses.tokens import Loss, Tokens
from asyncrl.types import Batch, Episode

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.config import ReplayConfig, TrainingConfig

Anchor = Literal["behaviour", "proximal", "interpolated"]


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine must compute before this algorithm's loss; each costs something, so the default is nothing."""

    proximal: bool = False
    """A forward pass at the start of each batch: fills `Batch.proximal_T`."""
    reference: bool = False
    """A reference model: fills `Batch.reference_T`."""
    entropy: bool = False
    """The exact entropy, differentiable: fills `Batch.entropy_T`."""
    statistics: bool = False
    """`statistics()` over the whole batch before the first loss: needs the forward pass too."""


class Algorithm(msgspec.Struct, kw_only=True):
    """The keys of every algorithm. A preset changes defaults; a key that is None takes its stage's own default."""

    n_samples: int = 8
    """Responses per prompt: the group size G."""
    temperature: float = 1.0
    """Sampling temperature; losses and log-probabilities are those of the tempered distribution."""

    advantage: Advantage = "group_norm"
    """How rewards become advantages."""
    objective: ObjectiveName = "ppo_clip"
    """The policy loss per token."""
    anchor: Anchor = "behaviour"
    """The policy that the objective's ratio compares with: the one that sampled, the trainer's at the start of the
    batch (needs training.minibatches >= 2), or one interpolated between the two by age."""
    correction: CorrectionName = "none"
    """Detached weight or mask for stale data, on what the objective's ratio leaves uncorrected."""
    aggregation: Aggregation = "token_mean"
    """How tokens are weighted over the optimiser step's whole batch."""

    clip_low: float | None = None
    """Lower clip of the ratio at 1 - clip_low (ppo_clip, gspo); for m2po the least tight it may get."""
    clip_high: float | None = None
    """Upper clip of the ratio at 1 + clip_high (ppo_clip, gspo); for m2po the least tight it may get."""
    dual_clip: float | None = None
    """ppo_clip: with A < 0 the loss is at most -dual_clip * A; 0 turns it off."""
    weight_max: float | None = None
    """cispo, dppo_tv: absolute cap on the ratio."""
    tau_positive: float | None = None
    """sapo: temperature of the gate where A > 0."""
    tau_negative: float | None = None
    """sapo: temperature of the gate where A <= 0."""
    divergence: float | None = None
    """dppo_tv: how far a probability may move along A before its token is masked."""
    moment_budget: float | None = None
    """m2po: mean squared log-ratio that the clip leaves."""
    topr_level: Literal["token", "sequence"] | None = None
    """topr: whose ratio tapers negatives, the token's or the response's."""
    vespo_k_positive: float | None = None
    """vespo: exponent where A > 0."""
    vespo_k_negative: float | None = None
    """vespo: exponent where A <= 0."""
    vespo_lambda_positive: float | None = None
    """vespo: decay where A > 0."""
    vespo_lambda_negative: float | None = None
    """vespo: decay where A <= 0."""
    eta: float | None = None
    """delightful: temperature of the gate."""

    correction_cap: float | None = None
    """token_tis, sequence_tis: largest weight."""
    correction_low: float | None = None
    """icepop, veto and the masks: lower end of the band."""
    correction_high: float | None = None
    """icepop, veto and the masks: upper end of the band."""
    opsm_divergence: float | None = None
    """opsm: mean log(mu / theta) above which a response with A < 0 is rejected."""
    fade_half_life: float | None = None
    """fade: versions after which a token with A < 0 counts half."""
    age_tightening: float = 0.0
    """a > 0: a bound c of the correction becomes c^(1 / (1 + a * lag)) for a token of that lag."""
    self_normalise: bool = False
    """Divide the correction's weights by their mean over the batch."""
    ess_lr: float | None = None
    """base > 0: the learning rate times sqrt(min(1, (ESS / B) / base)), ESS by response (VCPO 2602.17616)."""

    beta: float = 0.0
    """Weight of the KL penalty to the reference policy; 0 loads no reference."""
    kl: Estimator | None = None
    """KL estimator: k2 in the loss and k1 in the reward unless given."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty acts."""
    kl_unbiased: bool = False
    """Weight the KL estimate by theta / mu, which makes its gradient right off-policy."""

    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal before they are sent, and generate others."""
    overlong_buffer: int = 0
    """Tokens before the limit over which a soft penalty grows from 0 to -overlong_penalty; 0: none."""
    overlong_penalty: float = 1.0
    """Largest soft overlong penalty."""
    overlong_mask: bool = False
    """Responses cut off at the limit train nothing; they still count for their group's baseline."""

    def __post_init__(self) -> None:
        """A preset's bounds belong to its objective and correction: another one starts from its own defaults."""
        checks.forget_foreign_bounds(self)

    def needs(self) -> Needs:
        """What the engine must compute for this loss."""
        return Needs(
            proximal=self.anchor == "proximal",
            reference=self.beta > 0,
            statistics=self.objective == "m2po" or self.self_normalise,
        )

    def check(self, *, training: TrainingConfig, replay: ReplayConfig) -> None:
        """Raises ValueError, one line with the remedy, when the keys contradict each other or the run."""
        checks.check(self, training=training, replay=replay)

    def reward(self, episode: Episode, max_tokens: int) -> float:
        """The reward that is trained on: the environment's, less the soft overlong penalty (DAPO, eq. 13)."""
        if not self.overlong_buffer:
            return episode.reward
        length = int(episode.loss_mask.sum())
        excess = (length - (max_tokens - self.overlong_buffer)) / self.overlong_buffer
        return episode.reward - self.overlong_penalty * min(max(excess, 0.0), 1.0)

    def trains(self, episode: Episode) -> bool:
        """False: the response counts for its group's baseline and trains nothing (overlong mask)."""
        return not (self.overlong_mask and episode.finish_reason == "length")

    def keep(self, rewards_G: np.ndarray) -> bool:
        """False: drop the group before it is sent, reason `filtered` (dynamic sampling)."""
        return not self.dynamic_sampling or bool(np.ptp(rewards_G) > 0)

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """Rewards of a whole batch, float64 (P, G) -> advantages of the same shape."""
        return advantage_estimators.compute(self.advantage, rewards_PG)

    def statistics(self, logprobs_T: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over tokens or sequences which the engine adds up over the whole global batch, if `needs().statistics`.

        Returns scalars or 1-d histograms; they are summed over micro-batches and ranks, and the loss finds them in
        `batch.statistics`. Called without gradient, with the log-probabilities of the start of the batch.
        """
        return pipeline.statistics(self, logprobs_T, batch)

    def surrogate(self, tokens: Tokens) -> Loss:
        """The objective: loss per token from the ratio on the anchor. Override it to keep every other stage."""
        return pipeline.objective(self, tokens)

    def loss(self, logprobs_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probabilities of the current policy, fp32 (T,) -> (loss per token (T,), metrics per token (T,) each).

        No reduction: the engine computes `(loss_T * batch.weights_T).sum()` and averages each metric over all trained
        tokens of the global batch.
        """
        return pipeline.loss(self, logprobs_T, batch)

    def lr_scale(self, metrics: dict[str, float]) -> float:
        """Factor on this step's learning rate, from the step's `ratio/ess_sequence` (a share of the responses)."""
        if self.ess_lr is None:
            return 1.0
        return min(1.0, max(metrics["ratio/ess_sequence"], 0.0) / self.ess_lr) ** 0.5


def as_algorithm(cls: type) -> type[Algorithm]:
    """What the registry found -> an Algorithm class; an `nn.Module` loss becomes one. Else ValueError."""
    if issubclass(cls, Algorithm):
        return cls
    from torch import nn  # only a user's own loss module is worth importing torch for

    if issubclass(cls, nn.Module):
        from asyncrl.losses.modules import module_algorithm

        return module_algorithm(cls)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    raise ValueError(f"an algorithm is an Algorithm or an nn.Module class, got {cls.__module__}.{cls.__name__}")
