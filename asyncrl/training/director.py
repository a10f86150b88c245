"""The loop of trainer rank 0: take a batch, train, publish, log, save; serve newcomers while it waits.

trainer.py runs one Director. It talks to the replay server, tells all ranks what to do (member.py) and writes the run's
figures. It computes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from asyncrl.metrics import Epochs, Evaluated, open_timer, open_trackers
from asyncrl.replay.client import ReplayClient, Taken
from asyncrl.replay.exchange import ServerSilent
from asyncrl.settings import Run
from asyncrl.training import reports
from asyncrl.training.batch import prepare
from asyncrl.training.member import Export, Member, Publish, Save, Stop, Train, Wait
from asyncrl.training.prefetch import Prefetch
from asyncrl.weights.messages import SyncReport

log = logging.getLogger(__name__)

POLL_S = 0.05
"""How often a waiting trainer looks for newcomers and signals."""


class Director:
    """One run as rank 0 conducts it. `interrupted()` says whether somebody asked for an orderly end."""

    def __init__(
        self, run: Run, member: Member, *, connect: Callable[[], ReplayClient], interrupted: Callable[[], bool]
    ):
        self.run, self.member, self._interrupted = run, member, interrupted
        self._config = run.config
        self._client = connect()
        self._prefetch = Prefetch(
            connect(), num_groups=run.config.training.batch_size, limit_s=run.config.supervise.stall_limit_s
        )
        self._timer = open_timer(run, role="trainer", index=0)
        self._trackers = open_trackers(run, step=member.start.step)
        self._evaluated = Evaluated(run.dir)
        self._epochs = Epochs(run.dir, size=reports.epoch_size(run.env.epoch_prompts))
        self._step = member.start.step
        self._saved = member.start.step if member.start.step else -1
        self._forgotten = -1
        self._deserted = False
        """The replay server fell silent when this run was already told to end."""
        self._idle_s = 0.0
        self._row_at = time.perf_counter()
        """End of the last row's step: a row accounts for the time since then, the saving of a checkpoint included."""
        self._sync: dict[str, float] = {}

    def conduct(self) -> str:
        """Consumes groups; waits for a batch (bounded by supervise.stall_limit_s), unblocked by generators through the
        replay server; produces versions, rows of metrics, checkpoints. Returns why it ended: `done`, `data` or
        `interrupted`. Raises TakeTimeout with a diagnosis when no batch comes."""
        self._begin()
        self._row_at = time.perf_counter()
        reason, last = "done", self._config.training.steps
        if self._step < last:
            self._prefetch.begin(self._step + 1)
        while self._step < last:
            if self._step + 2 <= last:
                self._prefetch.begin(self._step + 2)  # to be asked for when the one that is awaited has come
            taken = self._await_batch()
            if taken is None or not taken.groups:
                reason = "interrupted" if taken is None else "data"
                break
            self._train(taken)
        self._end(reason)
        return reason

    def _begin(self) -> None:
        """Tell the replay server where this run stands, and the generators where weights come from."""
        start = self.member.start
        self._client.rewind(step=start.step, version=start.version)
        if self.member.warm_up:
            self._trackers.log({"step": 0, "version": 0, **self.member.warm_up})
        self._publish()

    def _await_batch(self) -> Taken | None:
        """The next batch; None when interrupted. Newcomers get the present weights meanwhile."""
        began = beat = time.perf_counter()
        serving_s = 0.0
        while not self._interrupted():
            self.member.does("waits for groups")
            with self._timer("take"):
                taken = self._prefetch.poll(POLL_S)
            now = time.perf_counter()
            if taken is not None:
                self._idle_s = now - began - serving_s
                return taken
            if self.member.sender.newcomers():
                self._publish()
                serving_s += time.perf_counter() - now
            elif now - beat > self._config.supervise.stall_s:
                self.member.order(Wait())
                self._announce()
                self._say_why()
                beat = now
        return None

    def _say_why(self) -> None:
        """What a long wait is for, in this process's log: where roles were started one by one nobody else tells."""
        for wait in self._client.status()["waiting"]:
            if wait["who"] == "trainer":
                log.warning("%s", wait["why"])

    def _train(self, taken: Taken) -> None:
        step, version = self._step + 1, self._step
        with self._timer("prepare"):
            sequences = prepare(taken.groups, algo=self.run.algo, config=self._config, step=step, version=version)
        start = time.perf_counter()
        with self._timer("train", step=step):
            row = self.member.order(Train(step), sequences.encode())
        train_s = time.perf_counter() - start
        self._step = step
        self._trackers.trained(step, taken.groups)
        due = step % self._config.training.sync_interval == 0 or step == self._config.training.steps
        if due or self.member.sender.newcomers():
            self._publish()
        ended = time.perf_counter()
        row |= reports.describe_groups(taken.groups) | reports.describe_sequences(sequences) | taken.metrics
        row |= self._epochs.after(taken.groups)
        row |= self._sync | self._timer.row() | reports.memory(self.member.ranks.device) | self._evaluated.new()
        row |= self._speed(row, sequences.lengths_B, train_s=train_s, total_s=ended - self._row_at)
        self._trackers.log({"step": step, "version": step, **row})
        self._trackers.samples(step, taken.groups)
        self._sync, self._idle_s, self._row_at = {}, 0.0, ended
        self._save_if_due()  # last: whoever resumes from this checkpoint finds the rows of all its steps

    def _speed(
        self, row: dict[str, float], lengths_B: np.ndarray, *, train_s: float, total_s: float
    ) -> dict[str, float]:
        member = self.member
        peak = reports.peak_flops(member.ranks.device)
        speed = {
            "time/step_s": total_s,
            "idle/trainer": min(1.0, self._idle_s / total_s),
            "throughput/trained_tokens_per_s": row["tokens/trained"] / total_s,
        }
        if peak is not None:
            done = reports.flops(member.policy.lm.config, member.num_parameters, lengths_B)
            speed["mfu"] = done / (train_s * peak * member.ranks.size)
        return speed

    def _publish(self) -> None:
        """Weights to the generators that are behind, then their version to the replay server, which admits by it.

        Newcomers get the newest weights, also between two syncs: then everybody does.
        """
        self._announce()
        with self._timer("publish", version=self._step):
            report: SyncReport = self.member.order(Publish(self._step))
        for dropped in report.dropped:
            log.warning("generator %d left the sync at %s: %s", dropped.index, dropped.stage, dropped.reason)
        self._tell(lambda: self._client.publish(version=self._step, step=self._step))
        if report.receivers:
            self._sync = _describe(report)

    def _announce(self) -> None:
        """Where generators find the weights. Said again and again: the server forgets a client that is silent."""
        address = self.member.sender.address
        assert address is not None
        self._tell(lambda: self._client.announce("weights", address))

    def _tell(self, say: Callable[[], None]) -> None:
        """Tell the replay server. One that has ended too does not keep an interrupted run from its checkpoint."""
        if self._deserted:
            return
        try:
            say()
        except ServerSilent as error:
            if not self._interrupted():
                raise
            log.warning("%s; this run ends without it", error)
            self._deserted = True

    def _save_if_due(self) -> None:
        every = self._config.checkpoint.every
        if every and self._step % every == 0:
            self._save()

    def _save(self) -> None:
        with self._timer("checkpoint", step=self._step):
            self.member.order(Save(self._step))
        self._saved = self._step
        self._forget()

    def _forget(self) -> None:
        """What none of the last checkpoints can ask for again may leave the journal."""
        oldest = self.member.checkpoints.oldest_step(until=self._step)
        if oldest is not None and oldest > self._forgotten:
            self._tell(lambda: self._client.forget(step=oldest))
            self._forgotten = oldest

    def _end(self, reason: str) -> None:
        """A last checkpoint, the model as a folder, and the end of every rank."""
        self._prefetch.close()
        if self._saved != self._step:
            self._save()
        if self._config.checkpoint.export and reason != "interrupted":
            with self._timer("export"):
                self.member.order(Export())
        self._tell(lambda: self._client.finish(reason))
        self.member.order(Stop())
        self._trackers.close()
        self._timer.close()
        self._client.close()


def _describe(report: SyncReport) -> dict[str, float]:
    """sync/*: seconds, bytes, and GB/s on the wire."""
    gbps = report.bytes / report.wire_s / 1e9 if report.wire_s else 0.0
    return {
        "sync/pause_s": report.pause_s,
        "sync/wire_s": report.wire_s,
        "sync/gather_s": report.gather_s,
        "sync/total_s": report.total_s,
        "sync/bytes": float(report.bytes),
        "sync/gbps": gbps,
        "sync/receivers": float(report.receivers),
        "sync/dropped": float(len(report.dropped)),
    }
