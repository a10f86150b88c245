"""How fast new weights travel: the whole sync, stage by stage, beside the raw broadcast of the same bytes.

    python benchmarks/weights.py            two GPUs, NCCL: shapes of Qwen3-0.6B, Qwen3-1.7B and Llama-3-8B
    python benchmarks/weights.py --smoke    two CPU processes, gloo, small shapes: shows that it runs, not how fast

One process plays trainer rank 0, one the generator, this one conducts. Per model: `raw`, a broadcast of as many bytes
from a buffer that is already there; `ours`, WeightSender.publish into an engine that copies into its parameters;
`each`, one broadcast per parameter straight into the receiver's parameters. Bucket sizes and buffer counts are swept
over `ours`. Random weights: only the shapes matter. Times are medians over `--repeats`, after two that do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrl.config import WeightsConfig
from asyncrl.weights.follower import follow
from asyncrl.weights.messages import JoinSpec, PlanSpec, SyncReport
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.wire import buffer_device, connect_store, open_wire, resolve_backend, serve_store, watch_store

QWEN3 = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "llama-3-8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                   "tie_word_embeddings": False},
    "small": {**QWEN3, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 8192,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip
WARM_UP = 2
BOUND_S = 300.0


def random_tensors(model: str, device: str) -> dict[str, Tensor]:
    """Random bf16 tensors with the names and shapes of `model`, from its Hugging Face configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(MODELS[model])
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    return {
        name: torch.empty(p.shape, dtype=torch.bfloat16, device=device).normal_() for name, p in meta.named_parameters()
    }


# -- the two processes -------------------------------------------------------------------------------------------------


class Resident:
    """An engine that holds a model's tensors and copies what it receives into them, as an engine does on a GPU."""

    def __init__(self, tensors: dict[str, Tensor], device: str) -> None:
        self.version, self.num_weight_ranks = -1, 1
        self._tensors, self._device, self._receiver = tensors, device, Receiver()
        self._paused_at, self._pause_s = 0.0, 0.0

    async def join_weights(self, spec: JoinSpec) -> None:
        await asyncio.to_thread(self._receiver.join, spec, 0, self._device)

    async def receive_weights(self, plan: PlanSpec) -> list[int]:
        self._paused_at = time.perf_counter()
        return await asyncio.to_thread(self._receiver.receive, plan, self._load)

    async def commit_weights(self, version: int) -> None:
        self._pause_s += time.perf_counter() - self._paused_at
        self.version = version

    async def discard_weights(self) -> None:
        raise RuntimeError("a benchmark's sync failed")

    def activity(self) -> dict[str, float]:
        return {"pause_s": self._pause_s}

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        torch._foreach_copy_([self._tensors[name] for name, _ in tensors], [t for _, t in tensors], non_blocking=True)


def trainer(pipe: Connection, model: str, device: str) -> None:
    """Rank 0: answers `broadcast` and `publish`."""
    torch.set_num_threads(1)
    tensors = random_tensors(model, device)
    store = serve_store("127.0.0.1", BOUND_S)
    _say(pipe, port=store.port, bytes=sum(t.nbytes for t in tensors.values()))
    while (command := _hear(pipe))["do"] != "end":
        if command["do"] == "broadcast":
            seconds = broadcast(store, command, 0, device, tensors)
            _say(pipe, seconds=seconds)
        else:
            publish(pipe, command, device, tensors)


def generator(pipe: Connection, model: str, device: str) -> None:
    """Rank 1: the other end of `broadcast`; follows a sender while `follow` lasts."""
    torch.set_num_threads(1)
    tensors = random_tensors(model, device)
    _say(pipe, ready=True)
    while (command := _hear(pipe))["do"] != "end":
        if command["do"] == "broadcast":
            store = connect_store(_spec(command, 1))
            _say(pipe, seconds=broadcast(store, command, 1, device, tensors))
        else:
            asyncio.run(_follow(pipe, command, device, tensors))


def broadcast(store: Any, command: dict, rank: int, device: str, tensors: dict[str, Tensor]) -> list[float]:
    """Seconds per repeat of sending all bytes through a group of our own, without any copy: `command["what"]` is `raw`,
    in chunks of `chunk` bytes from one buffer, or `each`, parameter by parameter."""
    spec, place = _spec(command, rank), torch.device(device)
    watch = watch_store(store, spec.generation)
    wire = open_wire(store, spec, rank, place, watch)
    if command["what"] == "each":
        pieces = [t.view(-1).view(torch.uint8) for t in tensors.values()]
    else:
        total, chunk = sum(t.nbytes for t in tensors.values()), command["chunk"]
        buffer = torch.ones(min(chunk, total), dtype=torch.uint8, device=buffer_device(spec, place))
        pieces = [buffer[: min(chunk, total - start)] for start in range(0, total, chunk)]
    seconds = []
    for _ in range(command["repeats"] + WARM_UP):
        _synchronize(place)
        wire.start(torch.zeros(16, dtype=torch.uint8, device=buffer_device(spec, place)))  # both are here
        wire.wait(watch)
        _synchronize(place)
        began = time.perf_counter()
        for piece in pieces:
            wire.start(piece)
        while wire.in_flight:
            wire.wait(watch)
        _synchronize(place)
        seconds.append(time.perf_counter() - began)
    wire.close()
    return seconds[WARM_UP:]


def publish(pipe: Connection, command: dict, device: str, tensors: dict[str, Tensor]) -> None:
    """Publish versions 0, 1, ... to the generator, and answer with the reports."""
    sender = WeightSender(
        tensors=tensors.items, rank=0, device=device, config=msgspec.convert(command["config"], WeightsConfig)
    )
    _say(pipe, address=sender.address)
    deadline = time.monotonic() + BOUND_S
    while sender.newcomers() == 0:
        if time.monotonic() > deadline:
            raise TimeoutError("no generator said hello")
        time.sleep(0.01)
    reports = [sender.publish(version) for version in range(command["repeats"] + WARM_UP)]
    if any(report.receivers != 1 for report in reports):
        raise RuntimeError(f"a sync failed: {[r.dropped for r in reports]}")
    _say(pipe, reports=reports[WARM_UP:], join_s=reports[0].join_s)
    sender.close()


async def _follow(pipe: Connection, command: dict, device: str, tensors: dict[str, Tensor]) -> None:
    engine, done, last = Resident(tensors, device), asyncio.Event(), command["repeats"] + WARM_UP - 1
    following = asyncio.create_task(
        follow(command["address"], engine, index=0, incarnation="benchmark",
               config=msgspec.convert(command["config"], WeightsConfig),
               on_version=lambda version: done.set() if version == last else None)
    )  # fmt: skip
    finished = asyncio.create_task(done.wait())
    await asyncio.wait({following, finished}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.2)  # the last Committed leaves
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    _say(pipe, version=engine.version)


def _spec(command: dict, rank: int) -> JoinSpec:
    return JoinSpec(host="127.0.0.1", port=command["port"], generation=command["generation"], first_rank=rank,
                    world_size=2, backend=command["backend"], timeout_s=BOUND_S)  # fmt: skip


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- the conductor -----------------------------------------------------------------------------------------------------


class Pair:
    """The two processes for one model."""

    def __init__(self, model: str, devices: tuple[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        for target, device in zip((trainer, generator), devices, strict=True):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, model, device), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self.backend = resolve_backend("auto", torch.device(devices[0]))
        hello, _ = (_hear(pipe) for pipe in self.pipes)
        self.port, self.bytes, self._generation = hello["port"], hello["bytes"], 1000

    def broadcast(self, what: str, repeats: int, chunk: int = 1 << 30) -> float:
        """Median seconds of the slower end."""
        self._generation += 1
        for pipe in self.pipes:
            _say(pipe, do="broadcast", what=what, repeats=repeats, chunk=chunk, port=self.port,
                 generation=self._generation, backend=self.backend)  # fmt: skip
        ends = [_hear(pipe)["seconds"] for pipe in self.pipes]
        return statistics.median(max(pair) for pair in zip(*ends, strict=True))

    def sync(self, repeats: int, **config: Any) -> dict[str, float]:
        """Median seconds of each stage of a publish."""
        config = {"timeout_s": BOUND_S, **config}
        _say(self.pipes[0], do="publish", repeats=repeats, config=config)
        address = _hear(self.pipes[0])["address"]
        _say(self.pipes[1], do="follow", repeats=repeats, config=config, address=address)
        answer = _hear(self.pipes[0])
        _hear(self.pipes[1])
        reports = [msgspec.convert(r, SyncReport) for r in answer["reports"]]
        stages = ("prepare_s", "gather_s", "wire_s", "load_s", "commit_s", "pause_s", "total_s")
        medians = {stage: statistics.median(msgspec.structs.asdict(r)[stage] for r in reports) for stage in stages}
        return medians | {"first_join_s": answer["join_s"]}

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            _say(pipe, do="end")
            process.join(30)
            process.kill()


def _say(pipe: Connection, **message: Any) -> None:
    pipe.send_bytes(msgspec.json.encode(message))


def _hear(pipe: Connection) -> dict:
    if not pipe.poll(BOUND_S):
        raise TimeoutError(f"no answer within {BOUND_S} s")
    return msgspec.json.decode(pipe.recv_bytes())


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every figure for one model."""
    pair = Pair(model, args.devices)
    try:
        result: dict[str, Any] = {"model": model, "bytes": pair.bytes, "backend": pair.backend}
        result["raw_s"] = pair.broadcast("raw", args.repeats)
        result["each_s"] = pair.broadcast("each", args.repeats)
        sweep = []
        for bucket in args.buckets:
            for buffers in args.buffers:
                setting = {"bucket_bytes": bucket, "num_buffers": buffers}
                sweep.append(setting | pair.sync(args.repeats, **setting))
        best = min(sweep, key=lambda row: row["total_s"])
        setting = {key: best[key] for key in ("bucket_bytes", "num_buffers")}
        result |= {"sweep": sweep, "ours": best}
        result["no_checksum"] = pair.sync(args.repeats, **setting, checksum=False)
        result["raw_again_s"] = pair.broadcast("raw", args.repeats)
        return result
    finally:
        pair.close()


def show(result: dict[str, Any]) -> None:
    """The table of one model."""
    size, ours = result["bytes"], result["ours"]
    raw = min(result["raw_s"], result["raw_again_s"])
    print(f"\n{result['model']}: {size / 1e9:.2f} GB over {result['backend']}")
    moves = {
        "raw broadcast": raw,
        "ours, wire with load and checksum": ours["wire_s"],
        "ours, end to end": ours["total_s"],
        "ours, end to end, no checksum": result["no_checksum"]["total_s"],
        "one broadcast per parameter": result["each_s"],
    }
    for name, seconds in moves.items():
        print(f"  {name:36} {1e3 * seconds:10.2f} ms {size / seconds / 1e9:8.1f} GB/s {raw / seconds:7.1%} of raw")
    for stage in ("prepare", "commit", "pause"):
        print(f"  {'ours, ' + stage:36} {1e3 * ours[stage + '_s']:10.2f} ms")
    print(f"  {'first join of the group':36} {1e3 * ours['first_join_s']:10.2f} ms")
    print("  bucket MiB  buffers   wire ms  pause ms  total ms")
    for row in result["sweep"]:
        times = "".join(f"{1e3 * row[key]:10.2f}" for key in ("wire_s", "pause_s", "total_s"))
        print(f"  {row['bucket_bytes'] / 2**20:10.2f} {row['num_buffers']:8}{times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small shapes over gloo on the CPU")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--bucket-mib", help="bucket sizes to sweep")
    parser.add_argument("--buffers", default="2,3", help="buffer counts to sweep")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--devices", help="of the trainer and of the generator")
    args = parser.parse_args()
    models = args.models or ("small" if args.smoke else "qwen3-0.6b,qwen3-1.7b,llama-3-8b")
    sizes = args.bucket_mib or ("0.25,1,4" if args.smoke else "64,128,256,512,1024")
    args.devices = tuple((args.devices or ("cpu,cpu" if args.smoke else "cuda:0,cuda:1")).split(","))
    args.buckets = [int(float(size) * 2**20) for size in sizes.split(",")]
    args.buffers = [int(count) for count in args.buffers.split(",")]
    results = [measure(model, args) for model in models.split(",")]
    for result in results:
        show(result)
    print(json.dumps({"benchmark": "weights", "results": results}))


if __name__ == "__main__":
    main()
