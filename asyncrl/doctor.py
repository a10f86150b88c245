"""`asyncrl doctor`: what this machine offers and lacks, one finding a line, each with what to do about it.

Every check is bounded and changes nothing. Exit code 1 when something would stop a run.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

Level = Literal["ok", "note", "bad"]
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "msgspec", "pyzmq", "xxhash", "safetensors")
EXTRAS = ("vllm", "wandb", "tensorboard", "peft", "datasets", "math-verify")
GIB = 1 << 30


class Finding(NamedTuple):
    level: Level
    text: str


def report() -> int:
    """Print every finding; 1 when one of them is bad."""
    worst = 0
    for check in (_versions, _gpus, _cpus, _memory, _shared_memory, _files, _ports, _disk):
        for finding in check():
            mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[finding.level]
            print(f"{mark}  {finding.text}")
            worst |= finding.level == "bad"
    return int(worst)


def _versions() -> Iterator[Finding]:
    level: Level = "ok" if sys.version_info >= (3, 11) else "bad"
    yield Finding(level, f"Python {platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        found = _version(name)
        yield Finding("ok", f"{name} {found}") if found else Finding("bad", f"{name} is not installed: `make`")
    for name in EXTRAS:
        found = _version(name)
        yield Finding("ok" if found else "note", f"{name} {found or 'is not installed (optional)'}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpus() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("note", "no NVIDIA driver: runs use the CPU and gloo")
        return
    query = [tool, "--query-gpu=index,name,memory.total,memory.used,compute_mode", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (subprocess.SubprocessError, OSError) as error:
        yield Finding("bad", f"nvidia-smi does not answer ({error}): is the driver loaded?")
        return
    yield from (Finding("ok", f"GPU {line}") for line in lines)
    yield from _torch_sees(len(lines))


def _torch_sees(wanted: int) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    seen = torch.cuda.device_count()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen == 0 and hidden is None:
        yield Finding("bad", f"torch {torch.__version__} sees none of {wanted} GPUs: install a CUDA build of torch")
    else:
        limit = f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else ""
        yield Finding("ok", f"torch sees {seen} of {wanted} GPUs{limit}")


def _cpus() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    yield Finding("ok", f"{usable} CPU cores usable, load {load:.1f}")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads not in (None, "1"):
        yield Finding(
            "note", f"OMP_NUM_THREADS={threads}: on CPU every process of a run will use that many threads; 1 is best"
        )


def _memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available
    level: Level = "ok" if free > 4 * GIB else "note"
    yield Finding(level, f"{free / GIB:.1f} GiB of memory free; each process with torch takes about 0.5 GiB")


def _shared_memory() -> Iterator[Finding]:
    if not Path("/dev/shm").exists():
        return
    free = shutil.disk_usage("/dev/shm").free
    if free < GIB:
        yield Finding(
            "note", f"/dev/shm has {free / GIB:.2f} GiB free: NCCL and vLLM want 1 GiB (docker: --shm-size=8g)"
        )
    else:
        yield Finding("ok", f"/dev/shm has {free / GIB:.1f} GiB free")


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        yield Finding("bad", f"only {soft} open files allowed (hard limit {hard}): ulimit -n 4096")
    else:
        yield Finding("ok", f"{soft} open files allowed")


def _ports() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        yield Finding("ok", "loopback ports can be bound and reached")
    except OSError as error:
        yield Finding("bad", f"loopback does not work ({error}): every process of a run talks over 127.0.0.1")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        yield Finding(
            "note", f"this host's own name {socket.gethostname()!r} does not resolve; gloo uses loopback then"
        )


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free
    level: Level = "ok" if free > 2 * GIB else "note"
    yield Finding(
        level, f"{free / GIB:.0f} GiB of disk free here; checkpoints hold weights and two optimiser moments in fp32"
    )
