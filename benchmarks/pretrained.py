"""A pretrained model through the whole engine: vLLM on one GPU, the trainer on the other, NCCL between them.

    python benchmarks/pretrained.py --model FOLDER                   two-digit addition, target lag 0 and 4, three seeds
    python benchmarks/pretrained.py --model FOLDER --gsm8k FOLDER    the same, and GSM8K beside them
    python benchmarks/pretrained.py --smoke                          a few steps of the tiny model on the CPU

FOLDER of --model is a Hugging Face folder (SmolLM2-135M-Instruct in bench.md), of --gsm8k one with train.jsonl and
test.jsonl. Runs start `--together` at a time and share the GPUs. What follows `--` goes to every `asyncrl train`.
Prints a table, then a line of JSON with the curves; draws OUT/pretrained.png. Exit code 1 when a ledger was open.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path
from statistics import mean, median
from typing import Any

from asyncrl.metrics import read_rows

GOAL = 0.8
FRESH = "mismatch/k3_by_lag/0"
"""Trainer against generator on tokens of the version that is trained: numerics alone."""
WINDOW = 10
"""Steps that a reward is averaged over."""
POINTS = 40
"""Points of a curve in the JSON."""
STOP_S = 60.0
ADDITION: dict[str, Any] = {
    "algo": "dapo",
    "env": "arithmetic",
    "env.other-digits": 2,
    "training.batch-size": 32,
    "algo.n-samples": 16,
}
PRETRAINED: dict[str, Any] = {
    "env.style": "bare",
    "generation.max-tokens": 24,
    "training.seq-len": 128,
    "training.learning-rate": 1e-5,
}
GSM8K: dict[str, Any] = {
    "algo": "fade",  # without dynamic sampling: at first one response in a hundred is right
    "env": "gsm8k",
    "env.last-number": "true",
    "env.format-reward": 0.1,
    "training.learning-rate": 2e-5,
    "training.batch-size": 32,
    "training.steps": 100_000,
    "algo.n-samples": 8,
    "generation.max-tokens": 256,
    "training.seq-len": 768,
    "eval.every": 25,
    "eval.num-prompts": 256,
}
SHARING: dict[str, Any] = {
    "generation.engine": "vllm",
    "generation.max-concurrency": 512,
    "generation.vllm.kv-cache-memory-bytes": 6_000_000_000,
    "generation.vllm.gpu-memory-utilization": 0.1,
    "training.tokens-per-micro-batch": 8192,
}
"""A bounded cache instead of a share of the GPU, and small forward passes: other runs are on both."""
TINY: dict[str, Any] = {
    "algo.dynamic-sampling": "false",  # it is wrong too often
    "generation.max-tokens": 6,
    "training.seq-len": 32,
    "training.dtype": "float32",
    "training.learning-rate": 1e-3,
}
NOTHING_KEPT: dict[str, Any] = {"checkpoint.every": 0, "checkpoint.export": "false"}


def train(name: str, folder: Path, keys: dict[str, Any], more: list[str], deadline: float) -> dict[str, Any]:
    """One run to its end, or stopped at `deadline` (monotonic); what it did."""
    command = [sys.executable, "-m", "asyncrl", "train", "--run-dir", str(folder)]
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))] + more
    with open(folder.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
    stopped = process.returncode != 0
    row = {"run": name, **summarise(read_rows(folder), read_rows(folder, "eval.jsonl")), "stopped": stopped}
    print(line(row), flush=True)
    return row


def summarise(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last reward, steps to the goal, staleness, speed and the curve of one run."""
    rows = [row for row in rows if row.get("step") and "ledger/balance" in row]
    if not rows:
        return {"steps": 0}
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    smooth = [mean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
    late = rows[3:] or rows
    return {
        "steps": len(rows),
        "seconds": rows[-1]["time/elapsed_s"],
        "first": mean(rewards[:3]),
        "last": smooth[-1],
        "steps_to_goal": next((i + 1 for i, r in enumerate(smooth) if r >= GOAL and i + 1 >= WINDOW), None),
        "staleness_mean": mean(row["staleness/mean"] for row in rows),
        "staleness_max": max(row["staleness/max"] for row in rows),
        "mismatch_k3": median([row[FRESH] for row in late if FRESH in row] or [nan]),
        "step_s": median(row["time/step_s"] for row in late),
        "sync_ms": 1e3 * median(row["sync/total_s"] for row in late if "sync/total_s" in row),
        "generated_tokens_per_s": median(row["throughput/generated_tokens_per_s"] for row in late),
        "idle_trainer": median(row["idle/trainer"] for row in late),
        "idle_generator": median(row["idle/generator"] for row in late),
        "balance": max(abs(row["ledger/balance"]) for row in rows),
        "groups": rows[-1]["ledger/started"],
        "curve": [[i + 1, round(smooth[i], 3)] for i in range(0, len(smooth), max(1, len(smooth) // POINTS))],
        "evaluations": [{k: e[k] for k in e if k.startswith("eval/")} for e in evaluations],
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    if not row["steps"]:
        return f"{row['run']:>22}  no step"
    goal = row["steps_to_goal"] or "-"
    return (
        f"{row['run']:>22} {row['first']:8.3f} {row['last']:8.3f} {row['steps']:6} {goal:>8} "
        f"{row['staleness_mean']:6.2f} {row['staleness_max']:4.0f} {row['mismatch_k3']:9.1e} {row['step_s']:7.2f} "
        f"{row['sync_ms']:8.1f} {row['generated_tokens_per_s']:9.0f} {row['idle_trainer']:7.2f} "
        f"{row['idle_generator']:7.2f} {row['groups']:7.0f} {row['balance']:5.0f}"
    )


HEAD = (
    f"{'run':>22} {'first':>8} {'last':>8} {'steps':>6} {'to ' + str(GOAL):>8} {'stale':>6} {'max':>4} {'k3':>9} "
    f"{'step s':>7} {'sync ms':>8} {'tokens/s':>9} {'idle tr':>7} {'idle ge':>7} {'groups':>7} {'open':>5}"
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Reward over steps, a line per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        if row["steps"]:
            axes.plot(*zip(*row["curve"], strict=True), label=row["run"])
    axes.set(xlabel="step", ylabel=f"reward, mean of {WINDOW} steps", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder")
    parser.add_argument("--gsm8k", help="folder with train.jsonl and test.jsonl; none: not run")
    parser.add_argument("--lags", default="0,4")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=200, help="of addition; GSM8K trains until the time is over")
    parser.add_argument("--together", type=int, default=7, help="runs at once")
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which a run is stopped")
    parser.add_argument("--out", help="folder for the runs and the picture; none: a temporary one")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("options", nargs="*", help="after --: keys for every run")
    args = parser.parse_args()
    if not args.smoke and args.model is None:
        parser.error("--model FOLDER is needed (or --smoke)")
    if args.smoke:
        args.seeds, args.steps, args.together = "0", 3, 1
    out = Path(args.out or tempfile.mkdtemp(prefix="asyncrl-pretrained-"))
    out.mkdir(parents=True, exist_ok=True)
    model = TINY if args.smoke else {"model": args.model, **SHARING}
    addition = ADDITION | (model if args.smoke else PRETRAINED | model) | NOTHING_KEPT | {"training.steps": args.steps}
    jobs = [
        (f"addition-lag{lag}-seed{seed}", addition | {"replay.target-lag": lag, "seed": seed})
        for lag in filter(None, args.lags.split(","))  # "": no addition
        for seed in args.seeds.split(",")
    ]
    if args.gsm8k:
        jobs.append(("gsm8k-lag4", GSM8K | model | NOTHING_KEPT | {"dataset.path": args.gsm8k, "replay.target-lag": 4}))
    print(HEAD, flush=True)
    deadline = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.together) as pool:
        waiting = [pool.submit(train, name, out / name, keys, args.options, deadline) for name, keys in jobs]
        rows = [job.result() for job in waiting]
    draw(rows, out / "pretrained.png")
    print(json.dumps({"benchmark": "pretrained", "options": args.options, "runs": rows}))
    return int(any(row["steps"] == 0 or row["balance"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
