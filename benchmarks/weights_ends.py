"""The two processes of `weights.py`: one plays trainer rank 0, one the generator. Each obeys commands from a pipe.

The generator's engine is `Resident` (tensors on a device, copied into in place) or a live vLLM (`weights_vllm.py`).
"""

from __future__ import annotations

import asyncio
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrl.config import WeightsConfig
from asyncrl.weights.follower import follow
from asyncrl.weights.gather import in_sending_order
from asyncrl.weights.messages import JoinSpec, PlanSpec
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.sender import WeightSender
from asyncrl.weights.store import connect_store, serve_store, watch_store
from asyncrl.weights.wire import make_buffer, open_wire

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
BOUND_S = 420.0
WARM_UP = 2


def meta_model(model: str) -> Any:
    """The Hugging Face model of these shapes, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(MODELS[model])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))


def random_tensors(model: str, device: str) -> dict[str, Tensor]:
    """Random bf16 tensors with the names and shapes of `model`, in the order in which a trainer sends them."""
    return {
        name: torch.empty(p.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        for name, p in in_sending_order(meta_model(model).named_parameters())
    }


def say(pipe: Connection, **message: Any) -> None:
    pipe.send_bytes(msgspec.json.encode(message))


def hear(pipe: Connection) -> dict:
    if not pipe.poll(BOUND_S):
        raise TimeoutError(f"no answer within {BOUND_S} s")
    return msgspec.json.decode(pipe.recv_bytes())


# -- trainer rank 0 ----------------------------------------------------------------------------------------------------


def trainer(pipe: Connection, model: str, device: str) -> None:
    """Commands: broadcast; open a sender, publish versions, close it; theirs (vLLM's own transfer); end."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    tensors = random_tensors(model, device)
    store = serve_store("127.0.0.1", BOUND_S)
    sender = theirs = None
    say(pipe, port=store.port, bytes=sum(t.nbytes for t in tensors.values()))
    while (command := hear(pipe))["do"] != "end":
        match command["do"]:
            case "broadcast":
                say(pipe, seconds=broadcast(store, command, 0, device, tensors))
            case "open":
                config = msgspec.convert(command["config"], WeightsConfig)
                sender = WeightSender(tensors=tensors.items, rank=0, device=device, config=config)
                say(pipe, address=sender.address)
            case "publish":
                say(pipe, reports=publish(sender, **command["how"]))
            case "close":
                sender.close()
            case "theirs":
                import weights_vllm
                import weights_vllm_ipc

                kind = {"nccl": weights_vllm, "ipc": weights_vllm_ipc}[command["transfer"]]
                theirs = theirs or kind.TheirSender(command["port"])
                say(pipe, seconds=theirs.send(tensors, packed=command["packed"]))


def publish(sender: WeightSender, *, first: int, count: int, every_s: float) -> list[Any]:
    """Publish `count` versions, one each `every_s` seconds (0: one after the other)."""
    deadline = time.monotonic() + BOUND_S
    while sender.newcomers() == 0 and first == 0:
        if time.monotonic() > deadline:
            raise TimeoutError("no generator said hello")
        time.sleep(0.01)
    reports, began = [], time.monotonic()
    for number in range(count):
        time.sleep(max(began + number * every_s - time.monotonic(), 0))
        reports.append(sender.publish(first + number))
    if any(report.receivers != 1 for report in reports):
        raise RuntimeError(f"a sync failed: {[r.dropped for r in reports]}")
    return reports


def broadcast(store: Any, command: dict, rank: int, device: str, tensors: dict[str, Tensor]) -> list[float]:
    """Seconds per repeat of sending all bytes through a group of our own, without any copy: `command["what"]` is `raw`,
    in chunks of `chunk` bytes from one buffer, or `each`, parameter by parameter."""
    place = torch.device(device)
    spec = JoinSpec(host="127.0.0.1", port=command["port"], generation=command["generation"], first_rank=rank,
                    world_size=2, backend=command["backend"], timeout_s=BOUND_S)  # fmt: skip
    watch = watch_store(store, spec)
    if spec.backend == "ipc":
        return copies(sum(t.nbytes for t in tensors.values()), command["repeats"], device) if rank == 0 else []
    wire = open_wire(store, spec, rank, place, watch)
    if command["what"] == "each":
        pieces = [t.view(-1).view(torch.uint8) for t in tensors.values()]
    else:
        total, chunk = sum(t.nbytes for t in tensors.values()), command["chunk"]
        buffer = make_buffer(spec, min(chunk, total), place, sends=rank == 0)
        pieces = [buffer[: min(chunk, total - start)] for start in range(0, total, chunk)]
    seconds = []
    for _ in range(command["repeats"] + WARM_UP):
        wire.start(make_buffer(spec, 16, place, sends=rank == 0))  # both are here
        wire.drain(watch)
        synchronize(place)
        began = time.perf_counter()
        for piece in pieces:
            wire.start(piece)
        wire.drain(watch)
        synchronize(place)
        seconds.append(time.perf_counter() - began)
    wire.close()
    return seconds[WARM_UP:]


def copies(total: int, repeats: int, device: str) -> list[float]:
    """Seconds per repeat of copying all bytes from one place of a GPU to another: its raw rate."""
    source, target = (torch.ones(total, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(repeats + WARM_UP):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- generator ---------------------------------------------------------------------------------------------------------


class Resident:
    """An engine that holds a model's tensors and copies what it receives into them, as an engine does on a GPU."""

    def __init__(self, tensors: dict[str, Tensor], device: str) -> None:
        self.version, self.num_weight_ranks = -1, 1
        self.tensors, self.device, self._receiver = tensors, device, Receiver()
        self._paused_at, self._pause_s = 0.0, 0.0

    async def join_weights(self, spec: JoinSpec) -> None:
        await asyncio.to_thread(self._receiver.join, spec, 0, self.device)

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

    async def close(self) -> None:
        self._receiver.leave()

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        torch._foreach_copy_([self.tensors[name] for name, _ in tensors], [t for _, t in tensors], non_blocking=True)


def generator(pipe: Connection, model: str, device: str, kind: str, transfer: str) -> None:
    """Commands: broadcast (the other end); follow a sender, unfollow; those of weights_vllm.Live; end."""
    torch.set_num_threads(1)
    asyncio.run(_generate(pipe, model, device, kind, transfer))


async def _generate(pipe: Connection, model: str, device: str, kind: str, transfer: str) -> None:
    live = None
    if kind == "vllm":
        os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]  # before anything asks for a GPU
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # vLLM's own IPC transfer pickles its handles
        from weights_vllm import Live

        live = Live(model, device, transfer)
        await live.engine.start()
    engine: Any = live.engine if live else Resident(random_tensors(model, device), device)
    following: asyncio.Task | None = None
    say(pipe, ready=True)
    while (command := await asyncio.to_thread(hear, pipe))["do"] != "end":
        match command["do"]:
            case "broadcast":
                spec = JoinSpec(host="127.0.0.1", port=command["port"], generation=0, first_rank=1, world_size=2,
                                backend=command["backend"], timeout_s=BOUND_S)  # fmt: skip
                store = connect_store(spec)
                say(pipe, seconds=await asyncio.to_thread(broadcast, store, command, 1, device, engine.tensors))
            case "follow":
                config = msgspec.convert(command["config"], WeightsConfig)
                following = asyncio.create_task(
                    follow(command["address"], engine, index=0, incarnation=os.urandom(4).hex(), config=config,
                           on_version=lambda version: None)
                )  # fmt: skip
            case "unfollow":
                assert following is not None
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            case _:
                assert live is not None
                say(pipe, **await live.obey(command))
    if live is not None:
        await live.idle()
    await engine.close()
