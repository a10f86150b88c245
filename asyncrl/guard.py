"""Ends what is left of a run. Every process of a run carries the run's mark in its environment, however deep it was
started.

`python -m asyncrl.guard MARK` waits for the end of its standard input, which only the launcher holds: also when the
launcher is killed with -9, nothing that it started, or that those started, survives it. `sweep` is the same for a
launcher that ends in order. It never touches a process without the mark.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil

MARK = "ASYNCRL_MARK"
"""Name of the environment variable. `setproctitle` would overwrite what the kernel shows: SPT_NOENV stops that."""


def members(mark: str) -> list[psutil.Process]:
    """Every living process that carries the mark, this one excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # ended meanwhile, a zombie, or somebody else's
            continue
    return found


def sweep(mark: str, *, timeout_s: float = 10.0) -> int:
    """Kill every member until none is left; returns how many there were."""
    deadline, killed = time.monotonic() + timeout_s, set()
    while (alive := members(mark)) and time.monotonic() < deadline:
        for process in alive:
            killed.add(process.pid)
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=0.5)
    return len(killed)


def main() -> None:
    """Waits for: end of standard input. Unblocked by: the launcher's end, of whatever kind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
