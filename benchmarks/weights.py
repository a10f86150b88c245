"""How fast new weights travel: the whole sync, stage by stage, beside the raw broadcast of the same bytes.

    python benchmarks/weights.py                  two GPUs, NCCL: shapes of Qwen3-0.6B, Qwen3-1.7B and Llama-3-8B
    python benchmarks/weights.py --devices cuda:0,cuda:0    one GPU that both share: ipc
    python benchmarks/weights.py --smoke          two CPU processes, gloo, small shapes: that it runs, not how fast
    python benchmarks/weights.py --engine vllm    then also into a live vLLM under load, and vLLM's own transfers

One process plays trainer rank 0, one the generator, this one conducts. Per model: `raw`, a broadcast of as many bytes
from a buffer that is already there (on one GPU: a copy of them); `ours`, WeightSender.publish into an engine that
copies into its parameters; `each`, one broadcast per parameter straight into the receiver's parameters. Bucket sizes
and buffer counts are swept over `ours`. Random weights: only the shapes matter. Times are medians over `--repeats`,
after two that do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import statistics
import sys
from typing import Any

import msgspec
import torch
from weights_ends import BOUND_S, MODELS, WARM_UP, generator, hear, say, trainer

from asyncrl.weights.messages import SyncReport
from asyncrl.weights.wire import resolve_backend

STAGES = ("prepare_s", "gather_s", "wire_s", "load_s", "commit_s", "pause_s", "total_s")


class Pair:
    """The two processes for one model."""

    def __init__(self, model: str, devices: tuple[str, str], kind: str = "resident") -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        one_gpu = devices[0] == devices[1] != "cpu"
        self.backend = "ipc" if one_gpu else resolve_backend("auto", torch.device(devices[0]))
        for target, arguments in (
            (trainer, (model, devices[0])),
            (generator, (model, devices[1], kind, self.backend)),
        ):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *arguments))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self.trainer, self.generator = self.pipes
        hello, _ = hear(self.trainer), hear(self.generator)
        self.port, self.bytes, self._generation, self._version = hello["port"], hello["bytes"], 1000, 0

    def broadcast(self, what: str, repeats: int, chunk: int = 1 << 30) -> float:
        """Median seconds of the slower end."""
        self._generation += 1
        for pipe in self.pipes:
            say(pipe, do="broadcast", what=what, repeats=repeats, chunk=chunk, port=self.port,
                generation=self._generation, backend=self.backend)  # fmt: skip
        ends = [seconds for pipe in self.pipes if (seconds := hear(pipe)["seconds"])]
        return statistics.median(max(pair) for pair in zip(*ends, strict=True))

    def open(self, **config: Any) -> None:
        """A sender with this configuration, followed by the generator."""
        config = {"timeout_s": BOUND_S, "backend": self.backend, **config}
        say(self.trainer, do="open", config=config)
        say(self.generator, do="follow", config=config, address=hear(self.trainer)["address"])
        self._version = 0

    def publish(self, count: int, every_s: float = 0.0) -> list[SyncReport]:
        say(self.trainer, do="publish", how={"first": self._version, "count": count, "every_s": every_s})
        self._version += count
        return [msgspec.convert(report, SyncReport) for report in hear(self.trainer)["reports"]]

    def shut(self) -> None:
        say(self.generator, do="unfollow")
        say(self.trainer, do="close")

    def sync(self, repeats: int, **config: Any) -> dict[str, float]:
        """Median seconds of each stage of a publish."""
        self.open(**config)
        first, *_ = warm = self.publish(WARM_UP)
        assert len(warm) == WARM_UP
        reports = self.publish(repeats)
        self.shut()
        return medians(reports) | {"first_join_s": first.join_s}

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                say(pipe, do="end")
        for process in self.processes:
            process.join(60)
            process.kill()


def medians(reports: list[SyncReport]) -> dict[str, float]:
    return {stage: statistics.median(msgspec.structs.asdict(r)[stage] for r in reports) for stage in STAGES}


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every figure for one model and an engine that only copies."""
    pair = Pair(model, args.devices)
    try:
        result: dict[str, Any] = {"model": model, "bytes": pair.bytes, "backend": pair.backend}
        result["raw_s"] = pair.broadcast("raw", args.repeats)
        if pair.backend == "ipc":
            result["gloo"] = pair.sync(1, backend="gloo")
        else:
            result["each_s"] = pair.broadcast("each", args.repeats)
        settings = [{"bucket_bytes": size, "num_buffers": count} for size in args.buckets for count in args.buffers]
        result["sweep"] = [setting | pair.sync(args.repeats, **setting) for setting in settings]
        result["ours"] = best = min(result["sweep"], key=lambda row: row["total_s"])
        setting = {key: best[key] for key in ("bucket_bytes", "num_buffers")}
        result["no_checksum"] = pair.sync(args.repeats, **setting, checksum=False)
        result["raw_again_s"] = pair.broadcast("raw", args.repeats)
        return result
    finally:
        pair.close()


def measure_vllm(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same sync into a live vLLM under load, what it costs in tokens, and vLLM's own transfers on a GPU."""
    pair = Pair(model, args.devices, "vllm")
    seconds = 4.0 if args.smoke else 20.0
    try:
        pair.open()
        pair.publish(WARM_UP)
        say(pair.generator, do="load", settle_s=seconds / 2)
        result: dict[str, Any] = {"requests": hear(pair.generator)["requests"]}
        say(pair.generator, do="rate", seconds=seconds)
        result["tokens_per_s"] = hear(pair.generator)["tokens_per_s"]
        say(pair.generator, do="rate", seconds=seconds)
        pair.publish(int(seconds / args.every_s), every_s=args.every_s)
        result["tokens_per_s_updating"] = hear(pair.generator)["tokens_per_s"]
        say(pair.generator, do="rate", seconds=seconds)
        again = hear(pair.generator)
        result |= {"tokens_per_s_again": again["tokens_per_s"], "loaded": again["loaded"]}
        pair.shut()
        settings = [{"bucket_bytes": size, "num_buffers": count} for size in args.buckets for count in args.buffers]
        result["sweep"] = [setting | under_load(pair, args, **setting) for setting in settings]
        result |= min(result["sweep"], key=lambda row: row["total_s"])
        print(f"{model} into vLLM: {json.dumps(result)}", file=sys.stderr, flush=True)  # should what follows fail
        if args.devices[0] != "cpu":
            for packed in (True, False):
                result["theirs_packed" if packed else "theirs_unpacked"] = theirs(pair, args.repeats, packed=packed)
        return result
    finally:
        pair.close()


def under_load(pair: Pair, args: argparse.Namespace, **config: Any) -> dict[str, float]:
    """Median seconds of each stage of a publish into an engine that generates, and the 95th percentile of the pause."""
    pair.open(**config)
    pair.publish(WARM_UP)
    reports = pair.publish(3 * args.repeats, every_s=0.5)
    pair.shut()
    pauses = sorted(report.pause_s for report in reports)
    return medians(reports) | {"pause_p95_s": pauses[int(0.95 * (len(pauses) - 1))]}


def theirs(pair: Pair, repeats: int, *, packed: bool) -> dict[str, float]:
    """Median seconds of vLLM's own transfer into the same engine under the same load."""
    if not hasattr(pair, "their_port"):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            pair.their_port = probe.getsockname()[1]
    times = []
    for _ in range(repeats + WARM_UP):
        for pipe in pair.pipes:
            say(pipe, do="theirs", packed=packed, port=pair.their_port, transfer=pair.backend)
        hear(pair.trainer)
        times.append(hear(pair.generator))
    return {key: statistics.median(t[key] for t in times[WARM_UP:]) for key in times[0]}


def show(result: dict[str, Any]) -> None:
    """The tables of one model."""
    size, ours = result["bytes"], result["ours"]
    live = result.get("vllm")
    raw = min(result["raw_s"], result["raw_again_s"])
    print(f"\n{result['model']}: {size / 1e9:.2f} GB over {result['backend']}")
    moves = {
        "copy within the GPU" if "gloo" in result else "raw broadcast": raw,
        "ours, wire with load and checksum": ours["wire_s"],
        "ours, end to end": ours["total_s"],
        "ours, end to end, no checksum": result["no_checksum"]["total_s"],
    }
    if "gloo" in result:
        moves["through host memory (gloo)"] = result["gloo"]["total_s"]
    else:
        moves["one broadcast per parameter"] = result["each_s"]
    waits = {f"ours, {stage}": ours[f"{stage}_s"] for stage in ("prepare", "commit", "pause", "first_join")}
    if live:
        moves |= {"into vLLM, wire": live["wire_s"], "into vLLM, end to end": live["total_s"]}
        for name in ("packed", "unpacked"):
            if f"theirs_{name}" in live:
                own = live[f"theirs_{name}"]
                moves[f"vLLM's own, {name}, update alone"] = own["update_s"]
                moves[f"vLLM's own, {name}, paused"] = own["pause_s"]
                moves[f"vLLM's own, {name}, end to end"] = own["total_s"]
        waits |= {"into vLLM, pause p50": live["pause_s"], "into vLLM, pause p95": live["pause_p95_s"]}
    for name, seconds in moves.items():
        print(f"  {name:36} {1e3 * seconds:10.2f} ms {size / seconds / 1e9:8.1f} GB/s {raw / seconds:7.1%} of raw")
    for name, seconds in waits.items():
        print(f"  {name:36} {1e3 * seconds:10.2f} ms")
    if live:
        before, during = (live["tokens_per_s"] + live["tokens_per_s_again"]) / 2, live["tokens_per_s_updating"]
        rates = f"{before:.0f} tokens/s, {during:.0f} while updating ({during / before:.1%})"
        print(f"  {live['requests']} requests: {rates}; last load: {live['loaded']}")
    for title, sweep in (("resident", result["sweep"]), ("into vLLM", live["sweep"] if live else [])):
        print(
            f"  {title:10} MiB  buffers" + "".join(f"{stage[:-2]:>10}" for stage in STAGES) + "   ms" if sweep else ""
        )
        for row in sweep:
            times = "".join(f"{1e3 * row[stage]:10.2f}" for stage in STAGES)
            print(f"  {row['bucket_bytes'] / 2**20:14.2f} {row['num_buffers']:8}{times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small shapes over gloo on the CPU")
    parser.add_argument("--engine", choices=("resident", "vllm"), default="resident", help="vllm: measure it as well")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--bucket-mib", help="bucket sizes to sweep")
    parser.add_argument("--buffers", default="2,3", help="buffer counts to sweep (of receivers)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--every-s", type=float, help="seconds between updates while tokens are counted")
    parser.add_argument("--devices", help="of the trainer and of the generator")
    args = parser.parse_args()
    models = args.models or ("small" if args.smoke else "qwen3-0.6b,qwen3-1.7b,llama-3-8b")
    sizes = args.bucket_mib or ("0.25,1,4" if args.smoke else "64,128,256,512,1024")
    args.every_s = args.every_s or (1.0 if args.smoke else 5.0)
    args.devices = tuple((args.devices or ("cpu,cpu" if args.smoke else "cuda:0,cuda:1")).split(","))
    args.buckets = [int(float(size) * 2**20) for size in sizes.split(",")]
    args.buffers = [int(count) for count in args.buffers.split(",")]
    results = [measure(model, args) for model in models.split(",")]
    for result in results:
        if args.engine == "vllm":
            show(result)
            result["vllm"] = measure_vllm(result["model"], args)
        show(result)
    print(json.dumps({"benchmark": "weights", "results": results}))


if __name__ == "__main__":
    main()
