"""Variants tried in the search for an asynchronous default; what came of them is in bench.md, the losers included.

Used by `staleness.py --candidates`. One class composes how positives and negatives are weighted, where a token is
masked for having moved too far, and what age does; the ones that earned it became keys of `asyncrl.losses`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from asyncrl.algorithm import Algorithm
from asyncrl.losses.aggregation import Aggregation
from asyncrl.losses.tokens import Loss, Tokens

Weighting = Literal["one", "ratio", "floored", "taper", "sequence", "probability", "aging probability", "drift"]


class Candidate(Algorithm):
    """L = -[weight * mask] A logp, with a weight and a mask by the sign of A."""

    positive: Weighting = "one"
    """Weight where A > 0; see `weight`."""
    negative: Weighting = "taper"
    """Weight where A <= 0."""
    cap: float = 5.0
    """Largest weight."""
    negative_scale: float = 1.0
    """Negatives times this."""
    negative_age: float = 0.0
    """Negatives divided by 1 + this * lag; for `drift`, how much faster older ones fall off."""
    half_life: float = float("inf")
    """Negatives halved every this many versions."""
    oldest: float = float("inf")
    """Negatives older than this train nothing."""
    up: float = 2.0
    """A > 0 is masked once the probability rose by more than this."""
    down: float = 2.0
    """A <= 0 is masked once the probability fell by more than this."""
    low: float = 0.0
    """A <= 0 is masked once the ratio fell below this."""
    high: float = 1e9
    """A > 0 is masked once the ratio rose above this."""
    aggregation: Aggregation = "token_mean"

    def surrogate(self, tokens: Tokens) -> Loss:
        """The composed objective."""
        t, positive_T = tokens, tokens.advantages_T > 0
        w_T = t.log_ratio_T.detach().exp()
        negative_T = weight(self.negative, t, self) * self._fade(t.lags_T)
        weight_T = weight(self.positive, t, self).where(positive_T, negative_T)
        moved_T = t.logprobs_T.detach().exp() - t.anchor_T.exp()
        up_T = positive_T & ((moved_T > self.up) | (w_T > self.high))
        down_T = ~positive_T & ((moved_T < -self.down) | (w_T < self.low))
        loss_T = -weight_T.masked_fill(up_T | down_T, 0.0) * t.advantages_T * t.logprobs_T
        return loss_T, {"clip/high": up_T.to(w_T.dtype), "clip/low": down_T.to(w_T.dtype)}

    def _fade(self, lags_T: Tensor) -> Tensor:
        """What age leaves of a negative."""
        slow = 0.0 if self.negative == "drift" else self.negative_age
        kept_T = (lags_T <= self.oldest) * self.negative_scale / (1.0 + slow * lags_T)
        return kept_T * 0.5 ** (lags_T / self.half_life)


def weight(name: Weighting, t: Tokens, c: Candidate) -> Tensor:
    """(T,): 1, min(w, cap), w in [1, cap], min(w, 1), min(W, 1) of the response, p, p^(lag / (lag + 1)), or
    e^-((1 + negative_age * lag) |log w|)."""
    log_w_T, logp_T = t.log_ratio_T.detach(), t.logprobs_T.detach()
    return {
        "one": lambda: log_w_T.new_ones(log_w_T.shape),
        "ratio": lambda: log_w_T.exp().clamp(max=c.cap),
        "floored": lambda: log_w_T.exp().clamp(1.0, c.cap),
        "taper": lambda: log_w_T.clamp(max=0.0).exp(),
        "sequence": lambda: t.spread(t.sum_B(log_w_T).clamp(-20.0, 0.0).exp()),
        "probability": lambda: logp_T.exp(),
        "aging probability": lambda: (logp_T * t.lags_T / (1.0 + t.lags_T)).exp(),
        "drift": lambda: (-(1.0 + c.negative_age * t.lags_T) * log_w_T.abs()).exp(),
    }[name]()


class Faded(Algorithm):
    """Any objective with its negatives divided by 1 + lag."""

    def surrogate(self, tokens: Tokens) -> Loss:
        """The objective that the keys name, faded."""
        loss_T, metrics = super().surrogate(tokens)
        faded_T = (loss_T / (1.0 + tokens.lags_T)).where(tokens.advantages_T < 0, loss_T)
        return faded_T, metrics


FIRST_ROUND: dict[str, Algorithm] = {
    "one / one": Candidate(negative="one"),
    "one / ratio": Candidate(negative="ratio"),
    "one / taper": Candidate(),
    "one / sequence": Candidate(negative="sequence"),
    "floored / taper": Candidate(positive="floored"),
    "ratio / taper": Candidate(positive="ratio"),
    "one / none": Candidate(negative_scale=0.0),
    "one / .1": Candidate(negative="one", negative_scale=0.1),
    "one / taper .3": Candidate(negative_scale=0.3),
    "one / taper, faded .1": Candidate(negative_age=0.1),
    "one / one, faded .1": Candidate(negative="one", negative_age=0.1),
    "one / taper, down .2": Candidate(down=0.2),
    "one / taper, down .05": Candidate(down=0.05),
    "one / taper, low .5": Candidate(low=0.5),
    "one / one, low .5": Candidate(negative="one", low=0.5),
    "one / one, low .8": Candidate(negative="one", low=0.8),
    "one / one, up .2 down .2": Candidate(negative="one", up=0.2, down=0.2),
    "one / taper, up .2": Candidate(up=0.2),
    "one / taper, up .4 down .1": Candidate(up=0.4, down=0.1),
    "ratio / ratio, up .4 down .4": Candidate(positive="ratio", negative="ratio", cap=20.0, up=0.4, down=0.4),
    "ratio / ratio, up .4 down .1": Candidate(positive="ratio", negative="ratio", cap=20.0, up=0.4, down=0.1),
    "floored / taper, up .4 down .2": Candidate(positive="floored", up=0.4, down=0.2),
    "one / taper, high 5": Candidate(high=5.0),
    "one / one, low .8 high 5": Candidate(negative="one", low=0.8, high=5.0),
    "ppo, high 1": Algorithm(clip_high=1.0),
    "ppo, low .5 high 4": Algorithm(clip_low=0.5, clip_high=4.0),
    "m2po, budget .2": Algorithm(objective="m2po", moment_budget=0.2),
    "delightful, eta .3": Algorithm(objective="delightful", eta=0.3),
    "delightful, eta 3": Algorithm(objective="delightful", eta=3.0),
    "delightful, group_mean": Algorithm(objective="delightful", advantage="group_mean"),
}
SECOND_ROUND: dict[str, Algorithm] = {
    "one / one, faded 1": Candidate(negative="one", negative_age=1.0),
    "one / one, faded 3": Candidate(negative="one", negative_age=3.0),
    "one / one, half-life 1": Candidate(negative="one", half_life=1.0),
    "one / one, half-life 4": Candidate(negative="one", half_life=4.0),
    "one / one, fresh": Candidate(negative="one", oldest=0.0),
    "one / one, at most 2": Candidate(negative="one", oldest=2.0),
    "one / taper, faded 1": Candidate(negative_age=1.0),
    "one / sequence, faded 1": Candidate(negative="sequence", negative_age=1.0),
    "one / p": Candidate(negative="probability"),
    "one / p^age": Candidate(negative="aging probability"),
    "one / p, faded 1": Candidate(negative="probability", negative_age=1.0),
    "one / drift": Candidate(negative="drift"),
    "one / drift, aged .3": Candidate(negative="drift", negative_age=0.3),
    "ratio / one, faded 1": Candidate(positive="ratio", negative="one", negative_age=1.0),
    "floored / one, faded 1": Candidate(positive="floored", negative="one", negative_age=1.0),
    "opsm, aged .1": Algorithm(objective="reinforce", correction="opsm", age_tightening=0.1),
    "opsm, aged 1": Algorithm(objective="reinforce", correction="opsm", age_tightening=1.0),
    "dapo, faded 1": Faded(),
    "cispo, faded 1": Faded(objective="cispo"),
    "m2po, faded 1": Faded(objective="m2po"),
    "delightful, faded 1": Faded(objective="delightful"),
}
THIRD_ROUND: dict[str, Algorithm] = {
    "fade, half-life 2": Algorithm(objective="reinforce", correction="fade", fade_half_life=2.0),
    "fade, half-life 4": Algorithm(objective="reinforce", correction="fade", fade_half_life=4.0),
    "dapo + fade": Algorithm(correction="fade"),
    "cispo + fade": Algorithm(objective="cispo", correction="fade"),
    "m2po + fade": Algorithm(objective="m2po", correction="fade"),
    "dppo + fade": Algorithm(objective="dppo_tv", correction="fade"),
    "topr + fade": Algorithm(objective="topr", correction="fade"),
}
CANDIDATES = FIRST_ROUND | SECOND_ROUND | THIRD_ROUND
