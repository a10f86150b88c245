"""The last look at a group's age, where it is consumed: a bound that the limiter proves is still checked. Pure.

Called by `buffer.py` for every group of a batch.
"""

from __future__ import annotations

from asyncrl.replay.line import Seat
from asyncrl.types import NOT_SAMPLED


class StalenessExceeded(RuntimeError):
    """A group about to be trained is older than max_lag: an invariant between processes broke."""


def refuse_too_old(seat: Seat, *, version: int, max_lag: int) -> None:
    """Raise StalenessExceeded when the group was sampled more than `max_lag` versions ago, or by one still to come."""
    parcel = seat.parcel
    assert parcel is not None
    if parcel.newest_version > version and not seat.rewound:
        raise StalenessExceeded(
            f"group of prompt {seat.prompt.id} has tokens of version {parcel.newest_version}, but the trainer has "
            f"version {version} only"
        )
    lag = version - parcel.oldest_version if parcel.oldest_version != NOT_SAMPLED else 0
    if lag > max_lag:
        raise StalenessExceeded(
            f"group of prompt {seat.prompt.id} was sampled at version {parcel.oldest_version}, {lag} versions "
            f"before the trainer's {version}; max_lag is {max_lag}"
        )
