"""How far generation may run ahead: the admission bound, the window, and the settings that would deadlock.

Pure arithmetic, used by `buffer.py` and by the checks of the configuration. Never looks at a group.

Symbols: P groups per step; S target lag; M max lag; r reuse; q sync interval, all in optimiser steps; W window.
Step t (from 1) trains batch t and makes version t; so the trainer trains batch t at version t - 1. L is the step whose
version is live on the generators; at step t it is at least t - q. A *use* is one group trained in one step.

**Admission.** A lease promises r uses. It is granted only while (promised + made uses) + r <= (S + 1) P + L P, that is

    room = floor(((S + 1) P + trained - committed) / r)      trained = L P, committed = promised + made uses

which is the same as floor(((S + 1) P + trained) / r) - admitted, and stays right when a group is dropped after some
uses.

**Bound.** Let x be leased at live version L, so that no token of it is older than L, and let it be used for the j-th
time in step t. Before step t, (t - 1) P uses were made. At most r (A - 1) + (j - 1) of them were of x or of leases
before x, where A counts the admitted leases up to x, and r A <= (S + 1 + L) P. The rest were of later leases. A later
lease is picked only if fewer than W admitted leases lie from the *anchor* (the oldest lease that is not used up and not
already picked for this batch) to it: with x as the anchor or after it, that is at most r (W - 1) uses; and in each of
the j - 1 batches that used x before, at most P - 1 more. Together

    (t - 1) P <= (S + 1 + L) P - r + (j - 1) P + r (W - 1)        so with j <= r
    lag = t - 1 - L <= S + r + floor(r (W - 2) / P) = M

For r = 1 this is S + ceil((W - 1) / P); W = 1 is strict first-in-first-out, where M = S. Drops only lower A and the
number of later leases, and a lease that expired keeps its place in line, so neither weakens the bound. The order in
which a sampler picks inside the window does not matter.

**After a rewind** to the checkpoint of step k, L is k again, but the leases that versions after k had admitted keep
their places in line. Those of them that have no group are granted again only once r A, up to each, is within (S + 1 +
L) P; before that they would be older than the bound. The groups that are there were sampled by version k or later.

**Progress.** Suppose every lease ends (inserted, dropped, or expired and granted again). Then all admitted groups are
in the buffer at some time, the anchor is among them, and picking it moves the anchor on: a batch of P different
groups exists if P groups are not used up. Before step t at least (S + 1 + t - q) P - (r - 1) uses are admitted and (t
- 1) P are made, so (S + 2 - q) P - (r - 1) are left, at most r per group. That makes P groups exactly if r <= S + 2 -
q: the condition `reuse + sync_interval <= target_lag + 2`, which for the one or the other is reuse <= S + 1 and
sync_interval <= S + 1. A capacity below P groups would also stop everything; the bound in bytes never holds back the
first P groups.
"""

from __future__ import annotations

import msgspec

from asyncrl.config import ReplayConfig, TrainingConfig


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds the buffer; made by `make_limits`, which refuses what cannot work."""

    batch_size: int
    """P: groups per optimiser step."""
    target_lag: int
    """S."""
    max_lag: int
    """M: checked again at every take."""
    reuse: int = 1
    """r: uses per group."""
    window: int | None
    """W; None: no window, groups older than M are dropped instead."""
    capacity_groups: int
    capacity_bytes: int
    max_rejected: int
    """Consecutive drops, without one insert, after which the run ends with an error."""
    last_step: int | None = None
    """Uses beyond this step are not admitted, so that a run generates what it trains and no more; None: no end."""

    @property
    def last_use(self) -> int | None:
        """Uses that a run of `last_step` steps can need. With reuse, one more batch keeps P different groups there."""
        if self.last_step is None:
            return None
        needed, r = self.last_step * self.batch_size, self.reuse
        return needed if r == 1 else r * (-(-needed // r) + self.batch_size)

    def allowed(self, *, trained: int) -> int:
        """Uses that may be promised and made; see the module's docstring."""
        allowed = (self.target_lag + 1) * self.batch_size + trained
        return allowed if self.last_use is None else min(allowed, self.last_use)

    def room(self, *, trained: int, committed: int) -> int:
        """How many leases admission allows now. Both arguments are in uses."""
        return max(0, (self.allowed(trained=trained) - committed) // self.reuse)


def least_max_lag(*, target_lag: int, batch_size: int, reuse: int) -> int:
    """M of the window W = 1: the smallest bound that can be held."""
    return max_lag_of(window=1, target_lag=target_lag, batch_size=batch_size, reuse=reuse)


def max_lag_of(*, window: int, target_lag: int, batch_size: int, reuse: int) -> int:
    """M = S + r + floor(r (W - 2) / P)."""
    return target_lag + reuse + (reuse * (window - 2)) // batch_size


def window_of(*, max_lag: int, target_lag: int, batch_size: int, reuse: int) -> int:
    """The largest W whose bound is at most M. Raises ValueError when even W = 1 exceeds it."""
    least = least_max_lag(target_lag=target_lag, batch_size=batch_size, reuse=reuse)
    if max_lag < least:
        raise ValueError(
            f"replay.max_lag must be at least {least} with target_lag {target_lag} and reuse {reuse}, got {max_lag}"
        )
    return 2 + ((max_lag - target_lag - reuse + 1) * batch_size - 1) // reuse


def make_limits(replay: ReplayConfig, training: TrainingConfig) -> Limits:
    """The limits of a configuration. Raises ValueError, with the remedy, when the run would deadlock."""
    P, S, r = training.batch_size, replay.target_lag, replay.reuse
    _check_positive(replay, training)
    _check_progress(S=S, r=r, q=training.sync_interval)
    shape = {"target_lag": S, "batch_size": P, "reuse": r}
    least = least_max_lag(**shape)
    if replay.order == "fifo":
        window: int | None = 1
        max_lag = least if replay.max_lag is None else replay.max_lag
        window_of(max_lag=max_lag, **shape)
    else:
        max_lag = replay.max_lag if replay.max_lag is not None else least + (2 if S else 0)
        window = window_of(max_lag=max_lag, **shape)
    if replay.stale == "drop":
        window = None
    capacity = (S + 2) * P if replay.capacity_groups is None else replay.capacity_groups
    if capacity < P:
        raise ValueError(
            f"replay.capacity_groups must hold one batch of {P} groups, got {capacity}: raise it or lower "
            "training.batch_size"
        )
    return Limits(
        batch_size=P,
        target_lag=S,
        max_lag=max_lag,
        reuse=r,
        window=window,
        capacity_groups=capacity,
        capacity_bytes=replay.capacity_bytes,
        max_rejected=replay.max_filtered * P,
        last_step=training.steps,
    )


def _check_positive(replay: ReplayConfig, training: TrainingConfig) -> None:
    least = {
        "training.batch_size": (training.batch_size, 1),
        "training.sync_interval": (training.sync_interval, 1),
        "training.steps": (training.steps, 0),
        "replay.reuse": (replay.reuse, 1),
        "replay.target_lag": (replay.target_lag, 0),
        "replay.capacity_bytes": (replay.capacity_bytes, 1),
        "replay.max_filtered": (replay.max_filtered, 1),
    }
    for name, (value, bound) in least.items():
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def _check_progress(*, S: int, r: int, q: int) -> None:
    if r > S + 1:
        raise ValueError(
            f"replay.reuse {r} with target_lag {S} would wait for ever, since too few groups are admitted for a batch: "
            f"lower reuse to {S + 1} or raise target_lag to {r - 1}"
        )
    if q > S + 1:
        raise ValueError(
            f"training.sync_interval {q} with replay.target_lag {S} would wait for ever, since no group is admitted "
            f"for the step that publishes: lower sync_interval to {S + 1} or raise target_lag to {q - 1}"
        )
    if r + q > S + 2:
        raise ValueError(
            f"replay.reuse {r} and training.sync_interval {q} together need replay.target_lag {r + q - 2}, got {S}"
        )
