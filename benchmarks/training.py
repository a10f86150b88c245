"""Trained tokens per second of one optimiser step, packed against padded, and what chunked log-probabilities save.

    python benchmarks/training.py                                          the demo model on one core
    python benchmarks/training.py --model PATH --device cuda --dtype bfloat16 --tokens 200000 --longest 4096

Lengths are long-tailed (log-normal), as responses are. `padded` is the usual way: rows padded to the longest of a
micro-batch, full logits, log_softmax, the same number of tokens per micro-batch, padding included. Prints a table, then
one line of JSON. Seconds of processor time are shown beside those of the clock: on a machine that other work shares,
only the former mean anything.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from asyncrl.config import Config
from asyncrl.models import build_model
from asyncrl.training.attention import packed_input
from asyncrl.training.model import load_policy, num_parameters
from asyncrl.training.packing import pack, plan
from asyncrl.training.ranks import join_ranks, make_mesh
from asyncrl.training.reports import flops, peak_flops


def long_tailed(tokens: int, *, longest: int, vocabulary: int) -> list[np.ndarray]:
    """Sequences of random tokens, `tokens` in all; the median length is an eighth of the longest."""
    rng, rows = np.random.default_rng(0), []
    while sum(map(len, rows)) < tokens:
        length = int(np.clip(rng.lognormal(np.log(longest / 8), 0.9), 2, longest))
        rows.append(rng.integers(0, vocabulary, length))
    return rows


def packed_step(policy, rows: Sequence[np.ndarray], *, budget: int, device: torch.device) -> None:
    (micro_batches,) = plan([len(row) for row in rows], num_ranks=1, budget=budget)
    for members in micro_batches:
        packed = pack([rows[i] for i in members], [np.arange(len(rows[i])) > 0 for i in members])
        policy(packed_input(packed, device, policy.kind))[0].sum().backward()


def padded_step(model, rows: Sequence[np.ndarray], *, budget: int, device: torch.device) -> None:
    for batch in padded_batches(sorted(rows, key=len), budget):
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(batch):
            ids[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), 1
        ids, mask = ids.to(device), mask.to(device)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
        (logprobs * mask[:, 1:]).sum().backward()


def padded_batches(rows: Sequence[np.ndarray], budget: int) -> list[list[np.ndarray]]:
    """Rows of ascending length, as many at once as the budget holds with padding: the kindest case for padding."""
    batches: list[list[np.ndarray]] = [[]]
    for row in rows:
        if len(row) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def measure(step: Callable[[], None], *, repeats: int, device: torch.device) -> dict[str, float]:
    """Seconds of clock and processor per step, and the peak of GPU memory."""
    cuda = device.type == "cuda"
    step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    cpu, clock = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        step()
    if cuda:
        torch.cuda.synchronize()
    clock, cpu = (time.perf_counter() - clock) / repeats, (time.process_time() - cpu) / repeats
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan")
    return {"clock_s": clock, "cpu_s": cpu, "peak_gb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=16_000, help="tokens of one step")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--budget", type=int, default=4096, help="tokens per micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    config = Config()
    config.model.path, config.training.dtype = args.model, args.dtype
    ranks = join_ranks(with_gpus=args.device == "cuda", timeout_s=600)
    policy = load_policy(config, ranks, make_mesh(config.parallelism, ranks))
    lm_config = policy.lm.config
    rows = long_tailed(args.tokens, longest=args.longest, vocabulary=lm_config.vocab_size)
    lengths = np.array([len(row) for row in rows])
    how = {"budget": args.budget, "device": ranks.device}
    model = build_model(args.model, dtype=getattr(torch, args.dtype), device=ranks.device)
    steps = {"packed": lambda: packed_step(policy, rows, **how), "padded": lambda: padded_step(model, rows, **how)}
    result = {name: measure(step, repeats=args.repeats, device=ranks.device) for name, step in steps.items()}
    work, peak = flops(lm_config, num_parameters(policy), lengths), peak_flops(ranks.device)
    print(f"{'':8}{'tokens/s':>12}{'tokens/cpu s':>14}{'peak GB':>10}{'mfu':>8}")
    for name, row in result.items():
        row |= {"tokens_per_s": lengths.sum() / row["clock_s"], "tokens_per_cpu_s": lengths.sum() / row["cpu_s"]}
        row["mfu"] = work / row["clock_s"] / peak if peak else float("nan")
        rates = f"{row['tokens_per_s']:12,.0f}{row['tokens_per_cpu_s']:14,.0f}"
        print(f"{name:8}{rates}{row['peak_gb']:10.2f}{row['mfu']:8.3f}")
    figures = {f"{name}/{key}": value for name, row in result.items() for key, value in row.items() if value == value}
    print(json.dumps({"benchmark": "training", **vars(args), "sequences": len(rows), **figures}))


if __name__ == "__main__":
    main()
