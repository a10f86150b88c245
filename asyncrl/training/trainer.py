"""One trainer rank, from its start to its end: `asyncrl train --role trainer` calls `main`.

Rank 0 directs (director.py), the others follow (member.py). Under torchrun or the launcher RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT say who is who; without them this is the only rank.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import FrameType

from asyncrl.fingerprint import fingerprint
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.dealer import Address
from asyncrl.replay.exchange import SILENCE_S
from asyncrl.replay.keys import load_keys
from asyncrl.settings import Run
from asyncrl.training.director import Director
from asyncrl.training.member import Member
from asyncrl.training.pulse import Pulse
from asyncrl.training.ranks import join_ranks, leave_ranks, place_of_rank

LAST_WORDS_S = 5.0
"""For a silent replay server once an end was asked for: a scheduler ends both at once, and soon kills."""
GLOO_MARGIN_S = 300.0
"""Collectives may take this much longer than the longest wait that rank 0 allows itself."""


def main(run: Run, address: Address, *, end: Callable[[BaseException], None]) -> None:
    """Train until training.steps or the end of the data; SIGINT and SIGTERM end it after a checkpoint, in order.

    `end` ends this process at once for the reason given, from any thread.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = _Stop()
    limits = run.config.supervise
    curve, known = load_keys(run.config.replay.keys, "client"), fingerprint(run.config)
    rank, size = place_of_rank()

    def patience_s() -> float:
        return LAST_WORDS_S if stop.asked else SILENCE_S

    def connect() -> ReplayClient:
        return ReplayClient(address, role="trainer", index=rank, curve=curve, run=known, silence_s=patience_s)

    pulse = Pulse(connect, size=size, every_s=limits.heartbeat_s, limit_s=limits.stall_limit_s, end=end)
    pulse.does("joins the other ranks")
    ranks = join_ranks(
        with_gpus=run.config.services.trainer.with_gpus,
        timeout_s=max(limits.stall_limit_s, limits.start_timeout_s) + GLOO_MARGIN_S,
    )
    member = Member(run, ranks, connect=connect, does=pulse.does)
    if ranks.is_first:
        director = Director(run, member, connect=connect, interrupted=lambda: stop.asked)
        director.conduct()
    else:
        member.follow()
    pulse.close()
    leave_ranks()


class _Stop:
    """SIGINT and SIGTERM ask for an orderly end. Only rank 0 acts on it; the others follow its commands."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
