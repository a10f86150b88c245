"""Tokens per second of the local engine by concurrency and length, and the pause of a weight swap.

    python benchmarks/generation.py                                  the demo model on one core
    python benchmarks/generation.py --model PATH --device cuda       any model

Prints a table, then one line of JSON. Tokens per second of processor time are shown beside those of the clock: on a
machine that other work shares, only the former mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from dataclasses import dataclass

import torch

from asyncrl.generation.local import LocalEngine, choose_device, choose_dtype
from asyncrl.models import build_model
from asyncrl.types import SamplingParams

SIBLINGS = 8


@dataclass(frozen=True, kw_only=True)
class Load:
    """`concurrency` requests at any time, in groups of SIBLINGS with a prompt each."""

    name: str
    concurrency: int
    prompt: int
    response: int


LOADS = (
    Load(name="one request", concurrency=1, prompt=11, response=128),
    Load(name="the demo's prompts", concurrency=64, prompt=11, response=12),
    Load(name="64 requests", concurrency=64, prompt=11, response=128),
    Load(name="256 requests", concurrency=256, prompt=11, response=128),
    Load(name="longer context", concurrency=64, prompt=400, response=128),
)


async def measure(engine: LocalEngine, load: Load, *, vocabulary: int, seconds: float) -> dict[str, float]:
    """Keep `load` up for `seconds` after a first group, and count what comes out."""
    numbers = itertools.count()

    async def group(size: int) -> None:
        number = next(numbers)
        prompt = [4 + (number * 7919 + i * 31) % (vocabulary - 4) for i in range(load.prompt)]
        seeds = range(number * SIBLINGS, number * SIBLINGS + size)
        await asyncio.gather(
            *(engine.generate(prompt, SamplingParams(max_tokens=load.response, seed=seed)) for seed in seeds)
        )

    async def keep(size: int, until: float) -> None:
        while time.perf_counter() < until:
            await group(size)

    size = min(SIBLINGS, load.concurrency)
    await group(size)
    tokens, cpu, clock = engine.activity()["tokens"], time.process_time(), time.perf_counter()
    await asyncio.gather(*(keep(size, clock + seconds) for _ in range(load.concurrency // size)))
    tokens = engine.activity()["tokens"] - tokens
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    return {"tokens_per_s": tokens / clock, "tokens_per_cpu_s": tokens / cpu}


async def swap_pause_s(engine: LocalEngine, weights: list[tuple[str, torch.Tensor]], *, swaps: int) -> float:
    """Mean time that generation stands still for new weights, with 32 requests running."""
    running = [
        asyncio.create_task(engine.generate([5, 6, 7], SamplingParams(max_tokens=400, seed=i))) for i in range(32)
    ]
    before = engine.activity()["pause_s"]
    for version in range(1, swaps + 1):
        await engine.load_weights(weights, version)
    pause_s = (engine.activity()["pause_s"] - before) / swaps
    await asyncio.gather(*running)
    return pause_s


async def run(args: argparse.Namespace) -> dict[str, object]:
    """Every load on one engine; returns the figures."""
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)

    def build():
        return build_model(args.model, dtype=dtype, device=device)

    model = build()
    vocabulary, weights = model.config.get_text_config().vocab_size, list(model.named_parameters())
    engine = LocalEngine(build, max_concurrency=max(load.concurrency for load in LOADS), max_length=1024)
    await engine.start()
    rows: dict[str, dict[str, float]] = {}
    print(f"{'load':<20}{'requests':>9}{'prompt':>8}{'response':>9}{'tokens/s':>11}{'per CPU s':>11}")
    for load in LOADS:
        row = rows[load.name] = await measure(engine, load, vocabulary=vocabulary, seconds=args.seconds)
        figures = f"{row['tokens_per_s']:>11,.0f}{row['tokens_per_cpu_s']:>11,.0f}"
        print(f"{load.name:<20}{load.concurrency:>9}{load.prompt:>8}{load.response:>9}{figures}", flush=True)
    pause_s = await swap_pause_s(engine, weights, swaps=10)
    print(f"new weights between two tokens, 32 requests running: {pause_s * 1e3:.2f} ms")
    await engine.close()
    return {"model": args.model, "device": str(device), "dtype": str(dtype), "loads": rows, "swap_pause_s": pause_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a Hugging Face folder, a hub name, or tiny")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each load is kept up")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on CPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(asyncio.run(run(args))))


if __name__ == "__main__":
    main()
