"""The processes of a run, forked from one that has imported torch: a resume costs two seconds instead of fifteen.

Used by resume.py in place of `asyncrl train`. Every process is the real one (`roles.run_role`, in a session of its own,
killed with SIGKILL, nothing shared with the next); only the launcher is played here: what it does at a death is a dozen
lines, and tests/test_launch_run.py holds the real one to them.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

from asyncrl.launch import hold_port
from asyncrl.replay.server import read_address
from asyncrl.roles import LAUNCHER, run_role
from asyncrl.settings import load, resolve, resume, save

PRELOAD = [
    "asyncrl.training.trainer",
    "asyncrl.generation.generator",
    "asyncrl.generation.local",
    "asyncrl.replay.server",
    "transformers.models.qwen3.modeling_qwen3",
]
START_S = 120.0


class Forked:
    """One launch, as resume.Launch is one. `poll` must be called now and then: it is the launcher."""

    starting_s = 2.0
    """About how long a start takes: a kill at random strikes within."""

    def __init__(self, run_dir: Path, keys: dict[str, object], *, again: bool) -> None:
        self.dir = run_dir
        self._processes: dict[str, BaseProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        plain = {key.replace("-", "_"): value for key, value in keys.items()}
        run = resume(str(run_dir), plain) if again else resolve(load(None, {**plain, "run_dir": str(run_dir)}))
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "address.json").unlink(missing_ok=True)
        save(run)
        self.code: int | None = None
        self._address: str | None = None
        self._start("replay", 0)
        self._address = read_address(run_dir, timeout_s=START_S)
        services = run.config.services
        self._ranks = [f"trainer {rank}" for rank in range(services.trainer.procs)]
        self._held = ExitStack()
        port = str(self._held.enter_context(hold_port()))
        common = {"WORLD_SIZE": str(len(self._ranks)), "LOCAL_WORLD_SIZE": str(len(self._ranks))}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(len(self._ranks)):
            self._start("trainer", rank, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for index in range(services.generator.num_replicas):
            self._start("generator", index)

    def _start(self, role: str, index: int, **env: str) -> None:
        arguments = (role, str(self.dir), index, self._address, env)
        process = self._context.Process(target=_be, args=arguments, daemon=True)
        process.start()
        self._processes[f"{role} {index}"] = process

    def poll(self) -> int | None:
        """The exit code of the run, once it has ended; decides what each death means."""
        dead = {name: p.exitcode for name, p in self._processes.items() if p.exitcode is not None}
        if self.code is not None:
            return self.code
        if any(code for name, code in dead.items() if not name.startswith("generator")):
            self._finish(1)
        elif all(rank in dead for rank in self._ranks):
            self._finish(0)
        else:
            for name, code in dead.items():
                if name.startswith("generator") and code:
                    self._start("generator", int(name.split()[1]))
        return self.code

    def _finish(self, code: int) -> None:
        """Generators end by themselves when the trainer is done; otherwise, and the server always, they are ended."""
        for name, process in self._processes.items():
            if name.startswith("generator") and code == 0:
                process.join(30.0)
        self._kill_all()
        self.code = code

    def kill(self, victim: str) -> str:
        """SIGKILL to the victim; returns who it was in the end."""
        if victim == "trainer -1":
            victim = self._ranks[-1]
        if victim in self._processes and self._processes[victim].exitcode is None:
            self._processes[victim].kill()
            self._processes[victim].join(10.0)
            return victim
        self._kill_all()
        self.code = 1
        return "everybody"

    def end(self) -> None:
        """Leave nothing behind."""
        self._kill_all()
        self._held.close()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(10.0)

    def text(self) -> str:
        logs = sorted((self.dir / "logs").glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def _be(role: str, run_dir: str, index: int, address: str | None, env: dict[str, str]) -> None:
    """In the forked process: the role, to its end. What it starts dies with it, as under the launcher."""
    os.setsid()
    os.environ.update(env, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", **{LAUNCHER: str(os.getppid())})
    log = os.open(f"{run_dir}/logs/{role}-{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run_role(role, run_dir=run_dir, index=index, address=address)
