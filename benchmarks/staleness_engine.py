"""Token reversal through the real asynchronous engine, next to the same lag forced by a queue.

`staleness.py --engine` calls `compare`. Each lag is one `asyncrl train`: replay server, generator and trainer as
processes of their own, a two-layer Qwen3 of random weights with as many symbols as the task has. The generator runs
ahead until the limiter holds it, so the lag is what comes out, not what is put in; it is measured, and `forced.py`,
which has the same model and parts, is then set to its mean. Success is that of the batch that is trained, in both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import forced
import numpy as np
import torch
from reversal import Task, steps_to

from asyncrl.arguments import parse
from asyncrl.metrics import read_rows
from asyncrl.settings import load, resolve

SPECIAL = ("<|pad|>", "<|eos|>", "<|unk|>", "=")
"""Tokens of the engine's model that are no symbol: answers that are always wrong."""
LATE = 20
"""Final success is the mean over the last batches."""


def compare(options: argparse.Namespace, label: str, command: list[str]) -> None:
    """Train by the engine at each of `options.lags`, then by the queue at the lags measured; print both, and JSON.

    `command` is what chooses `algorithm` on the command line.
    """
    rows, twins = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = _keys(options, save_model(folder / "model", options.task))
        for lag in options.lags:
            for seed in range(options.engine_seeds):
                rows.append(_by_engine(keys, command, folder / f"lag-{lag}-{seed}", lag=lag, seed=seed))
                print(f"target lag {lag}, seed {seed}: {json.dumps(rows[-1])}", flush=True)
        for depth in sorted({round(row["lag"]) for row in rows}):
            twins[str(depth)] = _by_force(keys, command, folder, depth=depth, seeds=options.engine_seeds)
            print(f"forced lag {depth}: {json.dumps(twins[str(depth)])}", flush=True)
    print(f"\n{label}, lr {options.lrs[0]:g}, {options.steps} steps")
    print(_table(rows, twins))
    print(json.dumps({"engine": rows, "forced": twins}))


def save_model(folder: Path, task: Task) -> Path:
    """A Hugging Face folder: random weights about the size of `reversal.py`'s policy, characters as tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *_letters(task)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    named = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=12, max_position_embeddings=64, tie_word_embeddings=False,
        initializer_range=48**-0.5, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.lm_head.weight, std=0.02)  # as the queue's policies: uniform answers at first
    model.save_pretrained(folder)
    return folder


def _letters(task: Task) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[: task.symbols]


def _keys(options: argparse.Namespace, model: Path) -> dict[str, object]:
    """The configuration that the engine and the forced lag share."""
    task: Task = options.task
    return {
        "model": model, "env": "token_reversal", "env.length": task.length, "env.alphabet": task.symbols,
        "algo.n-samples": task.group, "algo.dynamic-sampling": "false",
        "training.steps": options.steps, "training.batch-size": task.prompts, "training.learning-rate": options.lrs[0],
        "training.seq-len": 32, "training.tokens-per-micro-batch": 8192, "training.dtype": "float32",
        "generation.engine": "local", "generation.dtype": "float32",
        "generation.device": "cpu", "generation.max-tokens": task.length,
        "generation.max-groups": 2 * task.prompts, "generation.max-concurrency": 2 * task.prompts * task.group,
        "weights.bucket-bytes": 1 << 20, "services.trainer.with-gpus": "false", "checkpoint.every": 0,
        "checkpoint.export": "false", "metrics.trackers": "jsonl", "metrics.trace": "false",
    }  # fmt: skip


def _words(keys: dict[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def _by_engine(
    keys: dict[str, object], command: list[str], run_dir: Path, *, lag: int, seed: int
) -> dict[str, float | None]:
    """One run of the engine. Raises RuntimeError with its last lines when it fails."""
    argv = _words({**keys, "seed": seed, "run-dir": run_dir, "replay.target-lag": lag})
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "train", *command, *argv],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the engine failed:\n{(done.stdout + done.stderr)[-3000:]}")
    steps = [row for row in read_rows(run_dir) if row["step"]]
    lags = [row["staleness/mean"] for row in steps]
    settled = lags[len(lags) // 4 :]  # the first batches are of version 0 and have not grown old yet
    success = np.array([row["reward/trained_mean"] for row in steps])
    return {
        "target_lag": lag,
        "seed": seed,
        "lag": round(float(np.mean(settled)), 3),
        "lag_max": max(row["staleness/max"] for row in steps),
        "final": round(float(success[-LATE:].mean()), 4),
        "steps_to_0.9": steps_to(success, 0.9),
    }


def _by_force(
    keys: dict[str, object], command: list[str], folder: Path, *, depth: int, seeds: int
) -> list[dict[str, float | None]]:
    """The same run at a forced lag, one row per seed."""
    rows = []
    for seed in range(seeds):
        told = {**keys, "seed": seed, "run-dir": str(folder / f"forced-{depth}-{seed}")}
        run = resolve(load(None, parse(["train", *command, *_words(told)]).overrides))
        success = forced.train(run, depth)
        final = round(float(success[-LATE:].mean()), 4)
        rows.append({"seed": seed, "final": final, "steps_to_0.9": steps_to(success, 0.9)})
    return rows


def _table(rows: list[dict], forced: dict[str, list[dict]]) -> str:
    """Final success and steps to 0.9, engine beside queue, one line per run of the engine."""
    lines = [f"{'target lag':>10} {'seed':>4} {'mean lag':>8} {'max':>4}   {'engine':>11}   D   forced, by seed"]
    for row in rows:
        depth = str(round(row["lag"]))
        twins = "  ".join(f"{twin['final']:.3f} {twin['steps_to_0.9'] or 'never'}" for twin in forced[depth])
        mine = f"{row['final']:.3f} {row['steps_to_0.9'] or 'never':>5}"
        head = f"{row['target_lag']:>10} {row['seed']:>4} {row['lag']:>8.2f} {row['lag_max']:>4.0f}"
        lines.append(f"{head}   {mine:>11}   {depth}   {twins}")
    return "\n".join(lines)
