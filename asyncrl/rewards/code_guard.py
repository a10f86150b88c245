"""The process in which a response's code runs: takes away what it must not have, then runs it. Linux only.

`code.py` starts it as a script, isolated (`-I -S`), with one JSON job on stdin. It imports nothing of asyncrl. Limits
are the kernel's own (setrlimit), and a seccomp filter refuses the system calls for sockets, signals to others, leaving
the session, tracing and namespaces; neither can be taken back by what runs afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
SYSTEM_CALLS: tuple[str, ...] = ("socket", "socketpair", "connect", "kill", "tkill", "pidfd_send_signal", "ptrace")
SYSTEM_CALLS += (
    "process_vm_readv",
    "process_vm_writev",
    "unshare",
    "setns",
    "mount",
    "io_uring_setup",
    "bpf",
    "setsid",
    "setpgid",
)
NUMBERS = {
    "x86_64": (0xC000003E, (41, 53, 42, 62, 200, 424, 101, 310, 311, 272, 308, 165, 425, 321, 112, 109)),
    "aarch64": (0xC00000B7, (198, 199, 203, 129, 130, 424, 117, 270, 271, 97, 268, 40, 425, 280, 157, 154)),
}
"""AUDIT_ARCH value, then the numbers of SYSTEM_CALLS."""
X32_BIT = 0x40000000


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report = os.fdopen(os.dup(1), "w")
    result = {"guard": "", "error": "", "verdicts": []}
    try:
        guard(job)
    except OSError as error:
        result["guard"] = str(error)
    else:
        run(job, result)
    sys.stdout.flush()
    report.write(f"\n{job['key']}{json.dumps(result)}")
    report.flush()
    os._exit(0)


def guard(job: dict) -> None:
    """Limits and filter. Raises OSError when either cannot be set."""
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, PR_SET_PDEATHSIG, 9)
    seconds = int(job["time_s"]) + 1
    bounds = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in bounds.items():
        resource.setrlimit(limit, (value, value))
    refuse_system_calls(libc)


def refuse_system_calls(libc: ctypes.CDLL) -> None:
    """Install the seccomp filter: listed calls fail with EPERM, and so does every call of another architecture."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in NUMBERS:
        raise OSError(
            f"the filter for system calls knows Linux on {' and '.join(NUMBERS)}, not {sys.platform} {machine}"
        )
    architecture, numbers = NUMBERS[machine]
    steps = [(LOAD_WORD, 0, 0, 4), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE), (LOAD_WORD, 0, 0, 0)]
    steps += [(JUMP_AT_LEAST, len(numbers) + 1, 0, X32_BIT)]
    steps += [(JUMP_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer))
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    _prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program, len(program)))


def _prctl(libc: ctypes.CDLL, option: int, value: int, pointer: object = 0) -> None:
    arguments = [ctypes.c_ulong(value), pointer if pointer else ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)]
    if libc.prctl(ctypes.c_int(option), *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed: {os.strerror(ctypes.get_errno())}")


def run(job: dict, result: dict) -> None:
    """Run the code, then each test in its namespace; failures of either are results."""
    sys.stdin = open("stdin")  # noqa: SIM115 - it lives as long as the process
    namespace: dict = {"__name__": "__main__"}
    result["error"] = execute(job["code"], "solution", namespace)
    if job["tests"] is None or result["error"]:
        return
    with contextlib.redirect_stdout(io.StringIO()):
        result["verdicts"] = [not execute(test, "test", namespace) for test in job["tests"]]


def execute(source: str, name: str, namespace: dict) -> str:
    """Empty when the source ran to its end, otherwise what went wrong."""
    try:
        exec(compile(source, name, "exec"), namespace)
    except SystemExit as ended:
        # A program may end by sys.exit(); a test may not, or a solution could leave before the assertion.
        return "" if name == "solution" and not ended.code else f"SystemExit: {ended.code}"
    except BaseException as error:  # noqa: BLE001 - whatever a response raises is its failure, not ours
        return f"{type(error).__name__}: {error}"[:500]
    return ""


if __name__ == "__main__":
    main()
