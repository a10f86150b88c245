"""The losses once more, as plain loops over Python floats: what the tests compare `asyncrl.losses` with. Not a test.

Written from the papers' formulas, without tensors and without a line of the code under test. `total` gives the loss of
a whole batch and its derivative by each token's log-probability, worked out by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BOUND = 20.0
INF = math.inf


@dataclass
class Sequence:
    """One response: lists over its tokens."""

    theta: list[float]
    mu: list[float]
    prox: list[float]
    ref: list[float]
    lags: list[int]
    advantage: float
    reward: float


@dataclass
class Choice:
    """What an algorithm's keys say, with the defaults of the sheet written out."""

    objective: str
    correction: str = "none"
    anchor: str = "behaviour"
    aggregation: str = "token_mean"
    age_tightening: float = 0.0
    self_normalise: bool = False
    beta: float = 0.0
    kl: str = "k2"
    kl_in: str = "loss"
    kl_unbiased: bool = False
    max_tokens: int = 16
    bounds: dict[str, float] = field(default_factory=dict)
    tau: float = BOUND
    """m2po: the threshold of the whole batch; see `second_moment_threshold`."""


def clamp(value: float, low: float = -BOUND, high: float = BOUND) -> float:
    return min(max(value, low), high)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def anchor_of(choice: Choice, s: Sequence, t: int) -> float:
    if choice.anchor == "behaviour":
        return s.mu[t]
    if choice.anchor == "proximal":
        return s.prox[t]
    share = s.lags[t] / (s.lags[t] + 1)
    return s.mu[t] + share * clamp(s.theta[t] - s.mu[t])


def log_ratios(choice: Choice, s: Sequence) -> list[float]:
    return [clamp(s.theta[t] - anchor_of(choice, s, t)) for t in range(len(s.theta))]


def slope(choice: Choice, s: Sequence, t: int) -> float:
    """d log x / d log theta: 0 where the log-ratio is clamped; the anchor is a constant."""
    return 1.0 if abs(s.theta[t] - anchor_of(choice, s, t)) <= BOUND else 0.0


def clipped(x: float, dx: float, a: float, low: float, high: float, dual: float = 0.0) -> tuple[float, float]:
    value, grad = -a * x, -a * dx
    if -a * clamp(x, low, high) > value:
        value, grad = -a * clamp(x, low, high), 0.0
    if dual and a < 0 and value > -dual * a:
        value, grad = -dual * a, 0.0
    return value, grad


def objective(choice: Choice, s: Sequence, t: int, a: float) -> tuple[float, float]:
    """(value, derivative by log theta of token t) of the policy loss."""
    get = choice.bounds.get
    logp, logs = s.theta[t], log_ratios(choice, s)
    x, dx = math.exp(logs[t]), math.exp(logs[t]) * slope(choice, s, t)
    whole = math.exp(clamp(sum(logs)))
    name = choice.objective
    if name == "ppo_clip":
        return clipped(x, dx, a, 1 - get("clip_low", 0.2), 1 + get("clip_high", 0.28), get("dual_clip", 3.0))
    if name == "gspo":
        s_ratio = math.exp(sum(logs) / len(logs))
        return clipped(s_ratio, s_ratio, a, 1 - get("clip_low", 3e-4), 1 + get("clip_high", 4e-4))
    if name == "m2po":
        low = min(math.exp(-choice.tau), 1 - get("clip_low", 0.3))
        return clipped(x, dx, a, low, max(math.exp(choice.tau), 1 + get("clip_high", 0.5)))
    if name == "sapo":
        tau = get("tau_positive", 1.0) if a > 0 else get("tau_negative", 1.05)
        gate = sigmoid(tau * (x - 1))
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * dx * a
    if name == "reinforce":
        weight = 1.0
    elif name == "cispo":
        weight = min(x, get("weight_max", 5.0))
    elif name == "dppo_tv":
        moved, d = math.exp(logp) - math.exp(anchor_of(choice, s, t)), get("divergence", 0.2)
        masked = moved > d if a > 0 else moved < -d
        weight = 0.0 if masked else min(x, get("weight_max", 20.0))
    elif name == "topr":
        weight = 1.0 if a >= 0 else min(whole if get("topr_level", "sequence") == "sequence" else x, 1.0)
    elif name == "vespo":
        k, decay = (2.0, 3.0) if a > 0 else (3.0, 2.0)
        exponent = k * math.log(whole) + decay * (1 - whole)
        weight = math.exp(exponent) if exponent > -700 else 0.0
    elif name == "delightful":
        weight = sigmoid(a * -logp / get("eta", 1.0))
    else:
        raise AssertionError(name)
    return -weight * a * logp, -weight * a


def log_weights(choice: Choice, s: Sequence) -> list[float]:
    """log of what a correction corrects for: prox / mu with three policies, theta / mu with two or without a ratio."""
    if choice.anchor == "behaviour" or choice.objective in ("reinforce", "delightful"):
        return [clamp(p - q) for p, q in zip(s.theta, s.mu, strict=True)]
    return [clamp(anchor_of(choice, s, t) - s.mu[t]) for t in range(len(s.mu))]


def power(bound: float, exponent: float) -> float:
    return bound**exponent


def correction(choice: Choice, s: Sequence, t: int) -> float:
    """The weight before self-normalisation."""
    get, name = choice.bounds.get, choice.correction
    logs = log_weights(choice, s)
    tight = [1 / (1 + choice.age_tightening * lag) for lag in s.lags]
    rho, oldest = math.exp(logs[t]), min(tight)
    low_default, high_default = {
        "icepop": (0.5, 5.0), "sequence_mask": (0.5, 2.0), "geometric_mask": (0.99, 1.01), "veto": (1e-4, 100.0),
    }.get(name, (0.0, INF))  # fmt: skip
    low, high = get("correction_low", low_default), get("correction_high", high_default)
    if name == "none":
        return 1.0
    if name == "token_tis":
        return min(rho, power(get("correction_cap", 2.0), tight[t]))
    if name == "sequence_tis":
        return min(math.exp(clamp(sum(logs))), power(get("correction_cap", 5.0), oldest))
    if name == "icepop":
        return rho if power(low, tight[t]) <= rho <= power(high, tight[t]) else 0.0
    if name == "sequence_mask":
        return float(power(low, oldest) <= math.exp(sum(logs)) <= power(high, oldest))
    if name == "geometric_mask":
        return float(power(low, oldest) <= math.exp(sum(logs) / len(logs)) <= power(high, oldest))
    if name == "veto":
        return float(all(power(low, c) <= math.exp(v) <= power(high, c) for v, c in zip(logs, tight, strict=True)))
    if name == "opsm":
        drift = sum(clamp(q - p) for p, q in zip(s.theta, s.mu, strict=True)) / len(s.mu)
        return 0.0 if s.advantage < 0 and drift > get("opsm_divergence", 0.5) * oldest else 1.0
    if name == "fade":
        return 2 ** (-s.lags[t] / get("fade_half_life", 1.0)) if s.advantage < 0 else 1.0
    raise AssertionError(name)


def kl_value(name: str, d: float) -> tuple[float, float]:
    """(value, derivative by log theta); d = log ref - log theta."""
    inside = 1.0 if abs(d) <= BOUND else 0.0
    d = clamp(d)
    if name == "k1":
        return -d, inside
    if name == "k2":
        return d * d / 2, -d * inside
    value = math.exp(d) - d - 1
    return (value, (1 - math.exp(d)) * inside) if value <= 10 else (10.0, 0.0)


def kl_penalty(choice: Choice, s: Sequence, t: int) -> tuple[float, float]:
    value, grad = kl_value(choice.kl, s.ref[t] - s.theta[t])
    if not choice.kl_unbiased:
        return value, grad
    gap = s.theta[t] - s.mu[t]
    w, moves = math.exp(clamp(gap)), 1.0 if abs(gap) <= BOUND and choice.kl != "k2" else 0.0
    return w * value, w * grad + w * moves * value


def weight(choice: Choice, lengths: list[int], i: int) -> float:
    return {
        "token_mean": 1 / sum(lengths),
        "sequence_mean": 1 / (len(lengths) * lengths[i]),
        "sequence_sum": 1 / len(lengths),
        "constant": 1 / (len(lengths) * choice.max_tokens),
    }[choice.aggregation]


def total(choice: Choice, batch: list[Sequence]) -> tuple[float, list[list[float]]]:
    """(loss, derivative by each token's log theta) over the whole batch."""
    lengths = [len(s.theta) for s in batch]
    every = [correction(choice, s, t) for s in batch for t in range(len(s.theta))]
    scale = len(every) / max(sum(every), 1e-8) if choice.self_normalise else 1.0
    loss, grads = 0.0, []
    for i, s in enumerate(batch):
        grads.append([])
        for t in range(len(s.theta)):
            a = s.advantage
            if choice.beta and choice.kl_in == "reward":
                a -= choice.beta * sum(clamp(p - r) for p, r in zip(s.theta[t:], s.ref[t:], strict=True))
            value, grad = objective(choice, s, t, a)
            corrected = correction(choice, s, t) * scale
            value, grad = value * corrected, grad * corrected
            if choice.beta and choice.kl_in == "loss":
                extra, slope_ = kl_penalty(choice, s, t)
                value, grad = value + choice.beta * extra, grad + choice.beta * slope_
            loss += weight(choice, lengths, i) * value
            grads[-1].append(weight(choice, lengths, i) * grad)
    return loss, grads


def second_moment_threshold(choice: Choice, batch: list[Sequence], budget: float) -> float:
    """The largest tau with sum min(D^2, tau^2) <= budget * H over the H tokens where a clip could act, by bisection."""
    squares = [d * d for s in batch for d in log_ratios(choice, s) if d * s.advantage > 0]
    low, high = 0.0, BOUND
    if sum(squares) <= budget * len(squares):
        return high
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(q, middle * middle) for q in squares) <= budget * len(squares):
            low = middle
        else:
            high = middle
    return low
