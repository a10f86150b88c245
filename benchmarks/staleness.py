"""Which losses survive stale data: token reversal from scratch, with a lag forced by a queue of depth D.

    python benchmarks/staleness.py --device cuda --out DIR      the whole grid: minutes on one GPU
    python benchmarks/staleness.py --quick                      a corner of it: under two minutes on a CPU
    python benchmarks/staleness.py --engine                     two lags through `asyncrl train`: minutes on a CPU

A two-layer transformer of 57 thousand parameters learns to write its input backwards from reward alone: 1 if all of
it is right (exact), or the share that is (dense). `reversal.py` holds the task and the queue; thousands of policies run
side by side, each with its own seed, learning rate and lag. Prints a table; writes results.jsonl, curves.npz and
staleness.png into --out; the last line is JSON, {algorithm: {D: [final success of each seed]}}, each algorithm at its
best learning rate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from candidates import CANDIDATES, THIRD_ROUND
from reversal import Cell, Stack, Task, steps_to
from staleness_engine import compare

from asyncrl.algorithm import Algorithm
from asyncrl.registry import ALGOS

CONTENDERS: dict[str, tuple[str, dict]] = {
    "reinforce, uncorrected": ("reinforce", {"correction": "none"}),
    "reinforce + token_tis": ("reinforce", {}),
    "reinforce + icepop": ("reinforce", {"correction": "icepop"}),
    "reinforce + sequence_tis": ("reinforce", {"correction": "sequence_tis"}),
    "reinforce + token_tis, aged": ("reinforce", {"age_tightening": 0.1}),
    "reinforce + opsm": ("reinforce", {"correction": "opsm"}),
    "rloo": ("rloo", {}),
    "max_rl": ("max_rl", {}),
    "reinforce_pp": ("reinforce_pp", {}),
    "grpo": ("grpo", {"beta": 0.0}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {}),
    "cispo": ("cispo", {}),
    "gspo": ("gspo", {}),
    "sapo": ("sapo", {}),
    "m2po": ("m2po", {}),
    "dppo": ("dppo", {}),
    "topr": ("topr", {}),
    "vespo": ("vespo", {}),
    "delightful": ("delightful", {}),
    "fade": ("fade", {}),
    "decoupled_ppo": ("decoupled_ppo", {}),
    "decoupled, interpolated": ("decoupled_ppo", {"anchor": "interpolated"}),
}
"""Label -> algorithm and keys. `dynamic_sampling` never acts here: groups of equal rewards stay, with advantage 0."""


QUICK = ["reinforce, uncorrected", "reinforce + token_tis", "dapo", "delightful", "fade"]


def make_algorithm(label: str) -> Algorithm:
    """The algorithm behind a label."""
    if label in CANDIDATES:
        return CANDIDATES[label]
    name, keys = CONTENDERS[label]
    return ALGOS.get(name)(**keys)


Results = tuple[list[Cell], dict[str, np.ndarray], np.ndarray]
"""Cells trained so far, their curves (steps, cells) by name, and their final success (cells,)."""


def run(cells: list[Cell], options: argparse.Namespace) -> Iterator[Results]:
    """Train the cells chunk by chunk within the time limit; all results so far after each.

    Final success is measured on fresh samples, eight batches of them.
    """
    trained: list[Cell] = []
    curves: dict[str, list[np.ndarray]] = {}
    finals: list[np.ndarray] = []
    began = time.monotonic()
    for minibatches, chunk in _chunks(cells, options.chunk):
        labels = list(dict.fromkeys(c.algorithm for c in chunk))
        if time.monotonic() - began > options.limit_s:
            print(f"out of time, left out: {len(chunk)} runs of {', '.join(labels)}", flush=True)
            continue
        started, algorithms = time.monotonic(), {label: make_algorithm(label) for label in labels}
        stack = Stack(chunk, algorithms, task=options.task, minibatches=minibatches, device=options.device)
        stack.fill()
        history = [stack.step(step) for step in range(options.steps)]
        finals.append(stack.rollout(batches=8).exact.mean(1).cpu().numpy())
        for name in history[0]:
            curves.setdefault(name, []).append(torch.stack([h[name] for h in history]).cpu().numpy())
        trained += chunk
        print(f"{len(chunk)} runs in {time.monotonic() - started:.0f} s: {', '.join(labels)}", flush=True)
        yield trained, {name: np.concatenate(parts, axis=1) for name, parts in curves.items()}, np.concatenate(finals)


def _chunks(cells: list[Cell], size: int) -> Iterator[tuple[int, list[Cell]]]:
    """Cells to train side by side, those of an algorithm adjacent, all of one number of minibatches."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        minibatches = 2 if make_algorithm(cell.algorithm).needs().proximal else 1
        groups.setdefault((cell.reward, minibatches), []).append(cell)
    for (_, minibatches), group in groups.items():
        for start in range(0, len(group), size):
            yield minibatches, group[start : start + size]


def summarise(cells: list[Cell], curves: dict[str, np.ndarray], final: np.ndarray) -> list[dict]:
    """One row per cell."""
    rows = []
    for i, cell in enumerate(cells):
        late = {name: float(curve[-20:, i].mean()) for name, curve in curves.items() if name != "success"}
        reached = steps_to(curves["success"][:, i], 0.9)
        rows.append(asdict(cell) | {"final": round(float(final[i]), 4), "steps_to_0.9": reached} | late)
    return rows


def best_lr(rows: list[dict], algorithm: str, reward: str) -> float:
    """The learning rate with the best worst depth: mean final success over seeds, its minimum over D, then its mean."""
    mine = [r for r in rows if r["algorithm"] == algorithm and r["reward"] == reward]

    def score(lr: float) -> tuple[float, float]:
        means = [
            np.mean([r["final"] for r in mine if r["lr"] == lr and r["depth"] == d])
            for d in sorted({r["depth"] for r in mine})
        ]
        return round(float(min(means)), 3), float(np.mean(means))

    return max(sorted({r["lr"] for r in mine}), key=score)


def table(rows: list[dict], reward: str) -> str:
    """Final success (worst and mean seed) and median steps to 0.9 by D, each algorithm at its best learning rate."""
    depths = sorted({r["depth"] for r in rows})
    head = f"{reward} reward".ljust(30) + "lr".rjust(7) + "".join(f"D = {d}: min mean steps".rjust(26) for d in depths)
    lines = [head, "-" * len(head)]
    for algorithm in dict.fromkeys(r["algorithm"] for r in rows):
        lr = best_lr(rows, algorithm, reward)
        line = algorithm.ljust(30) + f"{lr:7g}"
        for depth in depths:
            mine = _select(rows, algorithm=algorithm, reward=reward, lr=lr, depth=depth)
            finals = [r["final"] for r in mine]
            steps = _median_steps(mine)
            line += f"{min(finals):.3f} {np.mean(finals):.3f} {steps if steps else 'never':>6}".rjust(26)
        lines.append(line)
    return "\n".join(lines)


def _select(rows: list[dict], **wanted: object) -> list[dict]:
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def _median_steps(rows: list[dict]) -> int | None:
    """Median over seeds; None when the median seed never got there."""
    steps = sorted(r["steps_to_0.9"] if r["steps_to_0.9"] is not None else 10**9 for r in rows)
    middle = steps[len(steps) // 2]
    return None if middle == 10**9 else middle


def last_line(rows: list[dict]) -> dict[str, dict[str, list[float]]]:
    """{algorithm: {D: final success by seed}}, exact reward, at the algorithm's best learning rate."""
    out: dict[str, dict[str, list[float]]] = {}
    reward = "exact" if any(r["reward"] == "exact" for r in rows) else "dense"
    for algorithm in dict.fromkeys(r["algorithm"] for r in rows if r["reward"] == reward):
        chosen = _select(rows, algorithm=algorithm, reward=reward, lr=best_lr(rows, algorithm, reward))
        by_depth = out.setdefault(algorithm, {})
        for row in sorted(chosen, key=lambda r: (r["depth"], r["seed"])):
            by_depth.setdefault(str(row["depth"]), []).append(round(row["final"], 3))
    return out


def draw(rows: list[dict], cells: list[Cell], curves: dict[str, np.ndarray], path: Path) -> None:
    """Success by step, one panel per D, exact reward, each algorithm's best learning rate, mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reward = cells[0].reward
    depths = sorted({c.depth for c in cells})
    figure, axes = pyplot.subplots(1, len(depths), figsize=(4.2 * len(depths), 4.5), sharey=True, squeeze=False)
    colours = pyplot.get_cmap("tab20")
    for axis, depth in zip(axes[0], depths, strict=True):
        for k, algorithm in enumerate(dict.fromkeys(c.algorithm for c in cells if c.reward == reward)):
            lr = best_lr(rows, algorithm, reward)
            key = (algorithm, reward, depth, lr)
            chosen = [i for i, c in enumerate(cells) if (c.algorithm, c.reward, c.depth, c.lr) == key]
            style = "-" if k < 20 else "--"
            axis.plot(curves["success"][:, chosen].mean(1), style, color=colours(k % 20), label=algorithm, lw=1)
        axis.set(title=f"lag {depth}", xlabel="optimiser step", ylim=(0, 1.02))
    axes[0][0].set_ylabel(f"success, {reward} reward")
    axes[0][-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse, train, print, write."""
    options = parse()
    torch.manual_seed(0)
    if options.engine:
        for label in options.algorithms:
            compare(options, label, _command(label))
        return
    cells = [
        Cell(algorithm=a, reward=r, depth=d, lr=lr, seed=s)
        for r in options.rewards
        for a in options.algorithms
        for d in options.depths
        for lr in options.lrs
        for s in range(options.seeds)
    ]
    for results in run(cells, options):
        if options.out:
            write(*results, options.out)
    cells, curves, final = results
    rows = summarise(cells, curves, final)
    for reward in dict.fromkeys(c.reward for c in cells):
        print(table([r for r in rows if r["reward"] == reward], reward), end="\n\n")
    if options.out:
        draw(rows, cells, curves, options.out / "staleness.png")
    print(json.dumps(last_line(rows)))


def _command(label: str) -> list[str]:
    """The words that choose this algorithm on the command line."""
    name, keys = CONTENDERS[label]
    return ["--algo", name, *(word for key, value in keys.items() for word in (f"--algo.{key}", str(value)))]


def write(cells: list[Cell], curves: dict[str, np.ndarray], final: np.ndarray, folder: Path) -> None:
    """results.jsonl, one line per cell, and curves.npz, arrays (steps, cells) in the same order."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in summarise(cells, curves, final)]
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    np.savez_compressed(folder / "curves.npz", **{name: curve.astype(np.float16) for name, curve in curves.items()})


def parse() -> argparse.Namespace:
    """The command line; `--quick` is a small corner of the grid."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few algorithms on a shorter task: D 0 and 16, two seeds, one rate"
    )
    parser.add_argument("--engine", action="store_true", help="the same small task through the asynchronous engine")
    parser.add_argument("--lags", nargs="+", type=int, default=[1, 4], help="target lags of the engine")
    parser.add_argument("--engine-seeds", type=int, default=1, help="runs of the engine per lag")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl, curves.npz and staleness.png")
    parser.add_argument(
        "--algorithms", nargs="+", choices=[*CONTENDERS, *CANDIDATES], metavar="NAME", help="default: all"
    )
    parser.add_argument("--candidates", action="store_true", help="the variants of candidates.py's last round instead")
    parser.add_argument("--rewards", nargs="+", choices=["exact", "dense"], default=["exact", "dense"])
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 1, 4, 16, 48])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--symbols", type=int, default=Task.symbols)
    parser.add_argument("--length", type=int, default=Task.length)
    parser.add_argument("--prompts", type=int, default=Task.prompts)
    parser.add_argument("--chunk", type=int, default=600, help="runs trained side by side")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no further runs after this time")
    options = parser.parse_args()
    if options.quick:
        options.algorithms = options.algorithms or QUICK
        options.rewards, options.depths, options.lrs = ["exact"], [0, 16], [4e-3]
        options.seeds, options.steps = 2, 160
        options.symbols, options.length, options.prompts = 4, 2, 8
    if options.engine:
        options.algorithms = options.algorithms or ["fade"]
        options.lrs, options.steps = options.lrs[-1:], min(options.steps, 200)
        options.symbols, options.length, options.prompts = 4, 2, 8
    options.task = Task(symbols=options.symbols, length=options.length, prompts=options.prompts)
    options.algorithms = options.algorithms or list(THIRD_ROUND if options.candidates else CONTENDERS)
    return options


if __name__ == "__main__":
    main()
