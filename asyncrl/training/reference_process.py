"""A reference process, from its start to its end: `asyncrl train --role reference` calls `main`.

It holds the model that the run began with, frozen, and answers the trainer's ranks. Which model that is it decides by
the same rule as the ranks (`initial_model`), once the first of them asks: by then a warm-up has ended. It keeps nothing
and can die at any time: ranks ask another one, and the launcher starts it again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from asyncrl.config import ParallelismConfig
from asyncrl.fingerprint import fingerprint
from asyncrl.hosts import reachable
from asyncrl.reference.directory import Beacon
from asyncrl.reference.messages import Packed
from asyncrl.reference.server import Job, ReferenceServer
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.dealer import Address
from asyncrl.replay.keys import load_keys
from asyncrl.settings import Run

if TYPE_CHECKING:
    import numpy as np

    from asyncrl.training.model import Policy
    from asyncrl.training.ranks import Ranks

log = logging.getLogger(__name__)
TICK_S = 0.2
"""How often a process with nothing to do looks whether it is over."""


def main(run: Run, index: int, address: Address, stop: threading.Event) -> None:
    """Answer until the run is finished. Raises KeyboardInterrupt when told to stop before, and what ended a thread."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    config = run.config
    curve, known = load_keys(config.replay.keys, "client"), fingerprint(config)
    server = ReferenceServer(bind=config.services.ref_model.bind, curve=load_keys(config.replay.keys, "server"))
    scorer = Scorer(run)
    beacon = Beacon(
        lambda: ReplayClient(address, role="reference", index=index, curve=curve, run=known),
        index=index,
        address=reachable(server.address),
        every_s=config.supervise.heartbeat_s,
        activity=scorer.activity,
    )
    try:
        _serve(server, beacon, scorer, stop)
    finally:
        beacon.close()
        server.close()


def _serve(server: ReferenceServer, beacon: Beacon, scorer: Scorer, stop: threading.Event) -> None:
    """Consumes jobs; waits for the next; unblocked by a rank, the run's end or a signal; produces answers."""
    scorer.prepare()
    while not beacon.finished:
        if stop.is_set():
            raise KeyboardInterrupt
        beacon.check()
        server.doing("has nothing to do")
        job = server.next(TICK_S)
        if job is not None:
            scorer.do(job, server)


class Scorer:
    """The model, and how to ask it."""

    def __init__(self, run: Run) -> None:
        self._run, self._held = run, None
        self._busy_s, self._tokens = 0.0, 0.0

    _held: tuple[str, Policy, Ranks] | None
    """The model's path, the model, and where it is."""

    def prepare(self) -> None:
        """Import what the model needs, which takes a while: after the process has said that it is there."""
        import torch

        from asyncrl.models import build_model

        build_model(self._run.config.model.path, dtype=torch.float32, device="meta", weights=False)

    def activity(self) -> dict[str, float]:
        """Cumulative counters for the replay server; called by the beacon's thread."""
        return {"busy_s": self._busy_s, "tokens": self._tokens, "ready": float(self._held is not None)}

    def do(self, job: Job, server: ReferenceServer) -> None:
        """One job to its end. What cannot be done is answered, so that the rank that asked ends with the reason."""
        if self._held is None:
            server.doing("loads its model")
            self._held = _load(self._run)
            server.set_ready()
        if job.packed is None:
            return
        path, policy, ranks = self._held
        server.doing(f"computes {len(job.packed.token_ids_S)} tokens")
        began = time.perf_counter()
        why = _refusal(job.packed, policy, held=path, wanted=job.model)
        server.answer(job, why or score(policy, job.packed, ranks, temperature=job.temperature))
        self._busy_s += time.perf_counter() - began
        self._tokens += len(job.packed.token_ids_S)


def _load(run: Run) -> tuple[str, Policy, Ranks]:
    from asyncrl.training.model import load_policy
    from asyncrl.training.ranks import join_alone, make_mesh
    from asyncrl.training.reference import initial_model

    ranks, path = join_alone(with_gpus=run.config.services.ref_model.with_gpus is not False), initial_model(run)
    policy = load_policy(run.config, ranks, make_mesh(ParallelismConfig(), ranks), path=path, trained=False)
    log.info("holds %s on %s", path, ranks.device)
    return path, policy, ranks


def _refusal(packed: Packed, policy: Policy, *, held: str, wanted: str) -> str:
    """Why this cannot be computed here; "" when it can."""
    if wanted != held:
        return f"it holds {held} and is asked for {wanted}: every process of a run must see the same run folder"
    vocabulary, highest = policy.lm.config.get_text_config().vocab_size, int(packed.token_ids_S.max())
    return f"token id {highest} is not among the {vocabulary} of {held}" if highest >= vocabulary else ""


def score(policy: Policy, packed: Packed, ranks: Ranks, *, temperature: float) -> np.ndarray:
    """The reference's log-probabilities of the tokens after the predictors, fp32 (T,), as the trainer computes them."""
    import torch

    from asyncrl.training.attention import packed_input
    from asyncrl.training.packing import repack

    inputs = packed_input(repack(packed.lengths, packed.token_ids_S, packed.predictors_T), ranks.device, policy.kind)
    with torch.no_grad():
        return policy(inputs, temperature=temperature)[0].cpu().numpy()
