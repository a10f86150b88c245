"""`asyncrl train` on one machine: starts the replay server, the trainer's ranks, the generators and, when there are
some, the reference processes, and supervises them.

What a death means is decided here. A generator's frees its leases and it is started again, within a budget; so is a
reference process, whose work others do meanwhile; a trainer's or the server's ends the run with the first traceback and
exit code 1. Ctrl-C asks the trainer for a checkpoint and ends in order; a second one kills. Whatever happens, no
process is left (supervise.Crew).

Ranks get the variables that torchrun would set. This process sets them itself because it then sees every rank's exit at
once; on several machines torchrun starts the same role (examples/slurm).
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

from asyncrl.console import Console, waiting
from asyncrl.notices import Notices
from asyncrl.placement import VISIBLE, Placement, find_gpus, place
from asyncrl.replay.server import read_address
from asyncrl.roles import describe_exit
from asyncrl.settings import Run, num_references, save
from asyncrl.status import Poller
from asyncrl.summary import changed_nothing, summarise
from asyncrl.supervise import Backoff, Child, Crew, Spec, clear_errors, first_error, obituary

TICK_S = 0.1
WORKERS = ("generator", "reference")
"""Roles that may die: their processes are started again."""
SILENCE = "silence"
"""What has been said about trainer ranks that are not heard from, beside what was about waits."""
SLACK_S = 10.0
"""Trainer ranks end by themselves when another one is missing; the launcher does when there is no other."""
RanksRole = Literal["trainer", "sft"]


class RunFailed(RuntimeError):
    """The run ended by a failure; the message is what the terminal shows."""


class Stop:
    """Ctrl-C and SIGTERM, counted. The first asks for an orderly end, the second for an immediate one."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def launch(run: Run, *, ranks: RanksRole = "trainer") -> int:
    """Run it to its end; returns the exit code. Raises ValueError for GPUs that are not there.

    `ranks` sft: supervised training, which has neither a replay server nor generators.
    """
    placement = place(find_gpus(), run.config.services)
    make_folder(run.dir)
    with _alone(run.dir):
        _prepare(run)
        return _supervise(run, placement, ranks)


def _supervise(run: Run, placement: Placement, ranks: RanksRole) -> int:
    with _signals() as stop, Crew(run.dir) as crew, Console(run) as console, Poller(run.dir) as poller:
        supervision = Supervision(run, crew, console, poller, stop, placement, ranks)
        try:
            code = supervision.run()
        except RunFailed as failure:
            poller.phase = "failed"
            console.note(f"asyncrl: {failure}")
            kept = ranks == "trainer" and any(run.dir.glob("checkpoints/step-*/COMPLETE"))
            again = f"; `asyncrl train --resume {run.dir}` continues it" if kept else ""
            console.note(f"asyncrl: the run failed; everything it wrote is in {run.dir}{again}")
            return 1
    print("\n".join(summarise(run.dir)), flush=True)
    if code == 0 and changed_nothing(run.dir, minibatches=run.config.training.minibatches):
        print("asyncrl: no step changed the model: loss or gradients were never finite", flush=True)
        return 1
    if code == 130:
        again = f"`asyncrl train --resume {run.dir}` continues it" if ranks == "trainer" else "nothing was kept of it"
        print(f"stopped; {again}", flush=True)
    return code


class Supervision:
    """One run, from the first process to the last."""

    def __init__(
        self,
        run: Run,
        crew: Crew,
        console: Console,
        poller: Poller,
        stop: Stop,
        placement: Placement,
        ranks: RanksRole,
    ) -> None:
        self.run_, self.crew, self.console, self.poller, self.stop = run, crew, console, poller, stop
        self.placement, self.limits = placement, run.config.supervise
        self.backoff = Backoff(self.limits.max_restarts)
        self.restarts: list[tuple[float, Spec]] = []
        """(when, what) of restarts that are due."""
        self.ranks, self.address = ranks, ""
        self.ranks_left = run.config.services.trainer.procs
        self.warned: dict[str, float] = {}
        self.notices = Notices(
            full_marks=run.env.full_marks, n_samples=run.algo.n_samples, batch_size=run.config.training.batch_size
        )

    def run(self) -> int:
        """Consumes: exits and signals. Waits for: the trainer's end. Produces: restarts, the display, an exit code."""
        for note in self.placement.notes:
            self.console.note(f"asyncrl: {note}")
        if self.ranks == "trainer":
            self._start_server()
        with hold_port() as port:
            for rank in range(self.ranks_left):
                self.crew.start(self._trainer(rank, port))
            if self.ranks == "trainer":
                self._start_others()
            self._phase("running")
            while self.ranks_left and not self.stop.count:
                self._tick()
        if self.stop.count:
            return self._interrupt()
        self._end("done")
        return 0

    def _start_others(self) -> None:
        """Reference processes first: they are known to the replay server before a rank looks for them."""
        wanted, references = self.run_.config.services.ref_model.num_replicas, num_references(self.run_)
        if wanted > references:
            name = self.run_.config.algo["name"]
            self.console.note(f"asyncrl: {name} with these keys reads no reference: none of {wanted} processes starts")
        for index in range(references):
            self.crew.start(self._spec("reference", index, **_threads(self.placement.references[index])))
        for index in range(self.run_.config.services.generator.num_replicas):
            self.crew.start(self._spec("generator", index, **_threads(self.placement.generators[index])))

    def _tick(self) -> None:
        self._bury(self.crew.take_dead())
        for due in [r for r in self.restarts if r[0] <= time.monotonic()]:
            self.restarts.remove(due)
            self.crew.start(due[1])
        self._warn_of_stalls()
        self._update()
        time.sleep(TICK_S)

    def _update(self) -> None:
        """Redraw, and say what is new and worth a line."""
        new = self.console.update(self.poller.status, phase=self.poller.phase)
        for line in [*self.notices.of_status(self.poller.status), *self.notices.of_rows(new)]:
            self.console.note(f"asyncrl: {line}")

    def _start_server(self) -> None:
        self._phase("starting the replay server")
        server = self.crew.start(self._spec("replay", 0))
        deadline = time.monotonic() + self.limits.start_timeout_s
        while not (self.run_.dir / "address.json").exists():
            if server.process.poll() is not None:
                raise RunFailed(obituary(server, self.run_.dir))
            if time.monotonic() > deadline:
                raise RunFailed(f"the replay server has not bound within {self.limits.start_timeout_s:.0f} s")
            if self.stop.count:
                return
            time.sleep(0.02)
        self.address = read_address(self.run_.dir, timeout_s=0.0)
        self.poller.connect(self.address, curve_dir=self.run_.config.replay.keys)

    def _bury(self, dead: list[Child]) -> None:
        """Decide what each death means. A signal or an earlier error came first, so those are looked at first."""
        for child in sorted(dead, key=self._when_it_failed):
            code, role = child.process.returncode, child.spec.role
            if role == self.ranks and code == 0:
                self.ranks_left -= 1
            elif role in WORKERS and code == 0:
                continue  # it was told that the run is finished
            elif role in WORKERS:
                self._plan_restart(child)
            else:
                raise RunFailed(obituary(child, self.run_.dir))

    def _when_it_failed(self, child: Child) -> float:
        record = first_error(self.run_.dir, since=child.started, name=f"{child.spec.role}-{child.spec.index}")
        return 0.0 if child.process.returncode < 0 else record.at if record else time.monotonic()

    def _plan_restart(self, child: Child) -> None:
        """A worker died: again after a pause, unless it could not even start or the budget is spent."""
        if self.poller.status.get("finished"):
            return
        text = obituary(child, self.run_.dir)
        if child.process.returncode > 0 and not self.poller.has_served(*child.spec.who, since=child.started):
            raise RunFailed(text)
        delay_s = self.backoff.next_delay_s()
        if delay_s is None:
            spent = f"generators and reference processes were restarted {self.limits.max_restarts} times: giving up"
            raise RunFailed(f"{text}\n{spent}")
        how = describe_exit(child.process.returncode)
        last = text.splitlines()[-1] if child.process.returncode > 0 else f"see {child.log}"
        self.console.note(f"asyncrl: {child.spec.name} ended ({how}): starting it again in {delay_s:.1f} s; {last}")
        clear_errors(self.run_.dir, [f"{child.spec.role}-{child.spec.index}"])
        self.restarts.append((time.monotonic() + delay_s, child.spec))

    def _interrupt(self) -> int:
        """Ctrl-C: a checkpoint from the trainer, then the end of everybody."""
        self._phase("stopping")
        kept = (
            "the trainer writes a checkpoint" if self.ranks == "trainer" else "supervised training keeps no checkpoint"
        )
        self.console.note(f"asyncrl: stopping; {kept} (once more Ctrl-C: kill)")
        self.crew.signal(signal.SIGTERM, self.ranks)
        deadline = time.monotonic() + self.limits.stop_timeout_s
        while self.crew.alive(self.ranks) and self.stop.count < 2 and time.monotonic() < deadline:
            self.console.update(self.poller.status, phase=self.poller.phase)
            time.sleep(TICK_S)
        if self.stop.count < 2:
            self._end("interrupted")
        return 130

    def _end(self, phase: str) -> None:
        """Tell the workers that it is over, then the server; each gets a bounded time."""
        self._phase("ending")
        self.poller.finish(phase)
        self.crew.wait(*WORKERS, timeout_s=self.limits.stop_timeout_s / 2)
        self.crew.signal(signal.SIGTERM, *WORKERS)
        self.crew.wait(*WORKERS, timeout_s=self.limits.stop_timeout_s / 4)
        self.poller.close()
        self.crew.signal(signal.SIGTERM, "replay")
        self.crew.wait("replay", timeout_s=self.limits.stop_timeout_s / 2)
        self.poller.phase = phase
        self._update()

    def _phase(self, phase: str) -> None:
        self.poller.phase = phase

    def _warn_of_stalls(self) -> None:
        """A wait longer than supervise.stall_s is said once, and again each time it has doubled; silence of a trainer
        rank at once. Raises RunFailed when that has lasted supervise.stall_limit_s: of the ranks nobody may be left to.

        Generators may well wait for a long step; before the first one their waits tell what the start hangs on.
        """
        waits = waiting(self.poller.status, at_least_s=self.limits.stall_s)
        if not any(wait.get("silent") for wait in waits):
            self.warned.pop(SILENCE, None)
        for wait in waits:
            who = SILENCE if wait.get("silent") else wait["who"]
            tells = wait["who"].startswith("trainer") or not self.console.last
            if tells and wait["for_s"] >= 2 * self.warned.get(who, 0.0):
                self.warned[who] = wait["for_s"]
                self.console.note(f"asyncrl: {wait['why']}")
            if wait.get("silent") and wait["for_s"] >= self.limits.stall_limit_s + SLACK_S:
                raise RunFailed(wait["why"])

    def _spec(self, role: str, index: int, **env: str) -> Spec:
        command = [sys.executable, "-m", "asyncrl", "train", "--role", role, "--index", str(index)]
        command += ["--run-dir", str(self.run_.dir)]
        if self.address:
            command += ["--address", self.address]
        return Spec(role=role, index=index, command=tuple(command), env=env)

    def _trainer(self, rank: int, port: int) -> Spec:
        ranks = str(self.run_.config.services.trainer.procs)
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return self._spec(self.ranks, rank, **env, **_threads(self.placement.trainer))


def _threads(placed: dict[str, str]) -> dict[str, str]:
    """On CPU one thread per process, as several processes share the cores; a value set by the user wins."""
    env = {"TOKENIZERS_PARALLELISM": "false", **placed}
    if not placed.get(VISIBLE) and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"
    return env


@contextmanager
def hold_port() -> Iterator[int]:
    """A free port for the ranks' rendezvous, kept from others: bound but not listening, so rank 0 can take it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock: the kernel frees it when this process ends, however it does."""
    with open(run_dir / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"a run is going on in {run_dir}: see `asyncrl status {run_dir}`") from None
        yield


def make_folder(run_dir: Path) -> None:
    """The run folder, for its owner alone; one that is there keeps its permissions. Raises ValueError."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)
        (run_dir / ".lock").touch()
    except OSError as error:
        raise ValueError(
            f"the run folder {run_dir} cannot be used: {error.strerror}; choose another with --run-dir"
        ) from None


def _prepare(run: Run) -> None:
    for name in ("address.json", "progress"):  # of an earlier launch
        (run.dir / name).unlink(missing_ok=True)
    clear_errors(run.dir)
    save(run)


@contextmanager
def _signals() -> Iterator[Stop]:
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
