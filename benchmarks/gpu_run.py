"""The steps of `four_gpus.sh` that are not training.

python benchmarks/gpu_run.py shape MODEL FOLDER [--device cuda]    a Hugging Face folder with random weights
python benchmarks/gpu_run.py raw FOLDER --ranks 3 [--device cuda]  GB/s of a plain broadcast of that many bytes
python benchmarks/gpu_run.py kill RUN --generator 1 --after 3      kill -9 that generator once step 3 is done
python benchmarks/gpu_run.py report RUN --raw GBPS                 what the run did; exit code 1 when it lost anything
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from statistics import median

import msgspec
import psutil
import torch
import torch.distributed as dist
from weights_ends import MODELS

from asyncrl.metrics import read_rows
from asyncrl.models import tiny_tokenizer

CHUNK = 1 << 30
WAIT_S = 900.0
WARM_UP = 3
"""Steps that do not count: compilation, first syncs."""


def shape(model: str, folder: str, device: str) -> None:
    """Save a model of these shapes with random bf16 weights and the tokenizer of the tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings, tokenizer = dict(MODELS[model]), tiny_tokenizer()
    config = AutoConfig.for_model(
        settings.pop("model_type"),
        **settings,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def raw(folder: str, ranks: int, device: str) -> float:
    """GB/s at which one rank's bytes reach all others, in chunks of the default bucket; median of 5 after 2."""
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    seconds = context.SimpleQueue()
    members = [context.Process(target=_broadcast, args=(r, ranks, port, size, device, seconds)) for r in range(ranks)]
    for member in members:
        member.start()
    for member in members:
        member.join(WAIT_S)
        if member.exitcode:
            raise RuntimeError(f"a rank of the raw broadcast ended with {member.exitcode}")
    return size / median(seconds.get()[2:]) / 1e9


def _broadcast(rank: int, ranks: int, port: int, size: int, device: str, seconds: multiprocessing.SimpleQueue) -> None:
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    buffer, taken = torch.zeros(min(size, CHUNK), dtype=torch.uint8, device=place), []
    for _ in range(7):
        dist.barrier()
        began = time.perf_counter()
        for start in range(0, size, CHUNK):
            dist.broadcast(buffer[: min(CHUNK, size - start)], src=0)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    if rank == 0:
        seconds.put(taken)
    dist.destroy_process_group()


def kill(run: Path, index: int, after: int) -> None:
    """Wait for step `after`, SIGKILL generator `index`, and note the process that takes its place in RUN/killed.json.

    Raises RuntimeError when the run never gets there."""
    deadline = time.monotonic() + WAIT_S
    while not any(row["step"] >= after for row in read_rows(run)):
        if time.monotonic() > deadline or ((run / "status.json").exists() and _phase(run) in ("done", "failed")):
            raise RuntimeError(f"{run} did not reach step {after}")
        time.sleep(0.1)
    victim = _generator(run, index)
    if victim is None:
        raise RuntimeError(f"{run} has no generator {index}")
    os.kill(victim, signal.SIGKILL)
    while (other := _generator(run, index)) in (None, victim):
        if time.monotonic() > deadline or _phase(run) in ("done", "failed"):
            break
        time.sleep(0.1)
    (run / "killed.json").write_text(json.dumps({"generator": index, "pid": victim, "replacement": other}))


def _generator(run: Path, index: int) -> int | None:
    """The process of that generator, by its title."""
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if line.startswith(f"asyncrl generator {index} ") and line.rstrip().endswith(run.name):
            return process.pid
    return None


def _phase(run: Path) -> str:
    return msgspec.json.decode((run / "status.json").read_bytes())["phase"]


def report(run: Path, raw_gbps: float) -> bool:
    """Print the table and the JSON; False when the ledger was open at any step or a killed generator stayed away."""
    rows = [row for row in read_rows(run) if row["step"] > WARM_UP]
    if not rows:
        print(f"{run} has no step after {WARM_UP}")
        return False

    def mid(name: str) -> float:
        return median(row[name] for row in rows)

    killed = json.loads((run / "killed.json").read_text()) if (run / "killed.json").exists() else None
    back = killed is None or killed["replacement"] is not None
    figures = {
        "step, s": mid("time/step_s"),
        "generated tokens/s": mid("throughput/generated_tokens_per_s"),
        "trained tokens/s": mid("throughput/trained_tokens_per_s"),
        "trainer idle": mid("idle/trainer"),
        "generators idle": mid("idle/generator"),
        "staleness, mean": mid("staleness/mean"),
        "sync, ms": 1e3 * mid("sync/total_s"),
        "sync pause, ms": 1e3 * mid("sync/pause_s"),
        "sync, GB/s": mid("sync/bytes") / mid("sync/total_s") / 1e9,
        **({"raw broadcast, GB/s": raw_gbps} if raw_gbps else {}),
        "ledger balance, largest": max(abs(row["ledger/balance"]) for row in rows),
    }
    for name, value in figures.items():
        print(f"  {name:26}{value:12,.3f}")
    print(f"  {'killed generator':26}{'-' if killed is None else 'came back' if back else 'did not come back':>12}")
    print(json.dumps({"benchmark": "four_gpus", "run": run.name, "back": back, **figures}))
    return back and figures["ledger balance, largest"] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, positional in (
        ("shape", ["model", "folder"]),
        ("raw", ["folder"]),
        ("kill", ["run"]),
        ("report", ["run"]),
    ):
        command = commands.add_parser(name)
        for argument in positional:
            command.add_argument(argument)
        command.add_argument("--device", default="cuda")
        command.add_argument("--ranks", type=int, default=3)
        command.add_argument("--generator", type=int, default=1)
        command.add_argument("--after", type=int, default=3)
        command.add_argument("--raw", type=float, default=0.0)
    told = parser.parse_args()
    match told.command:
        case "shape":
            shape(told.model, told.folder, told.device)
        case "raw":
            print(f"{raw(told.folder, told.ranks, told.device):.3f}")
        case "kill":
            kill(Path(told.run), told.generator, told.after)
        case "report":
            return 0 if report(Path(told.run), told.raw) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
