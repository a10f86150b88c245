"""One process of a run: `asyncrl train --role replay|generator|reference|trainer --run-dir R --index I`.

The launcher starts these; on a cluster SLURM does. This wrapper names the process, ties its life to its launcher's,
turns a failure into an error file that the launcher shows, and calls the role's own function. It knows nothing of what
they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from asyncrl.memory import keep_freed_memory
from asyncrl.replay.exchange import NoPlace, RankMissing
from asyncrl.replay.ledger import EndlessRejection
from asyncrl.replay.server import read_address
from asyncrl.settings import Run, load_run
from asyncrl.types import Refusal

LAUNCHER = "ASYNCRL_LAUNCHER"
"""Process id of the launcher, in the environment of what it starts."""
ELASTIC = "TORCHELASTIC_RUN_ID"
"""In the environment of what torch's elastic launcher starts."""
PLAIN = (EndlessRejection, NoPlace, RankMissing, Refusal)
"""Errors whose text says all there is to say."""

_PR_SET_PDEATHSIG = 1


def run_role(role: str, *, run_dir: str, index: int, address: str | None = None) -> NoReturn:
    """Be one process of a run, to its end. A failure is written to errors/<role>-<index>.json.

    The process ends here, past Python's and C++'s farewells: all that matters is closed by then, and threads of torch's
    process groups would turn a good end into an abort.
    """
    _leave(_run_role(role, run_dir=run_dir, index=index, address=address))


def _run_role(role: str, *, run_dir: str, index: int, address: str | None) -> int:
    index = int(os.environ.get("RANK", index)) if role in ("trainer", "sft") else index
    die_with_parent()
    keep_freed_memory()
    _set_title(f"asyncrl {role} {index} {run_dir}")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1 shows where a process stands
    try:
        _start(role, load_run(run_dir), index, address)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001 (a process boundary: whatever it was, the launcher must hear of it)
        if isinstance(error, PLAIN):
            print(f"asyncrl {role} {index}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        with contextlib.suppress(OSError):  # a copy of the run folder that cannot be written to; it is printed already
            write_error(Path(run_dir), role, index, error)
        return 1
    return 0


def _end_at_once(run_dir: Path, role: str, index: int, error: BaseException) -> NoReturn:
    """End this process from any thread: the main one may be in a collective that nobody ends."""
    print(f"asyncrl {role} {index}: {error}", file=sys.stderr)
    with contextlib.suppress(OSError):
        write_error(run_dir, role, index, error)
    _leave(1)


def _leave(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Linux: be killed when the process that started this one ends: our launcher or torch's, or a role. Elsewhere, and
    started by hand, nothing: a shell may well end before."""
    if not sys.platform.startswith("linux") or not {LAUNCHER, ELASTIC} & os.environ.keys():
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def write_error(run_dir: Path, role: str, index: int, error: BaseException) -> None:
    """What the launcher prints: the traceback of the first failure wins, by a clock that nobody sets; or its text alone
    where that says all there is to say."""
    folder = run_dir / "errors"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(traceback.format_exception(error))
    line = str(error) if isinstance(error, PLAIN) else ""
    record = {"role": role, "index": index, "traceback": text, "line": line, "at": time.monotonic()}
    temporary = folder / f".{role}-{index}.part"
    temporary.write_bytes(msgspec.json.encode(record))
    os.replace(temporary, folder / f"{role}-{index}.json")


def _start(role: str, run: Run, index: int, address: str | None) -> None:
    if role == "replay":
        from asyncrl.replay.server import serve  # each role imports only its own room

        serve(run, _stop_event())
        return
    if role == "sft":
        from asyncrl.training import supervised

        supervised.main(run)
        return
    server = address or _find_server(run)
    if role == "generator":
        from asyncrl.generation import generator

        generator.main(run, index, server)
    elif role == "reference":
        from asyncrl.training import reference_process

        reference_process.main(run, index, server, _stop_event())
    elif role == "trainer":
        from asyncrl.training import trainer

        trainer.main(run, server, end=partial(_end_at_once, run.dir, role, index))
    else:
        raise AssertionError(f"cli.py lets no role {role!r} pass")


def _find_server(run: Run) -> Callable[[], str]:
    """How to find the run's server, now and when it has been started again elsewhere; waits until there is one."""
    known = read_address(run.dir, timeout_s=run.config.supervise.start_timeout_s)

    def find() -> str:
        nonlocal known
        with contextlib.suppress(OSError):  # between two servers there may be none
            known = read_address(run.dir, timeout_s=0.0)
        return known

    return find


def _stop_event() -> threading.Event:
    """Set by SIGTERM: who serves others ends when the launcher says so, not before the last client."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    return stop


def _set_title(title: str) -> None:
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title)


def describe_exit(code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL`."""
    return f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
