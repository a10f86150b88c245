"""vLLM in `weights.py`: a live engine under load to publish into, and vLLM's own weight transfers to compare with.

`--engine vllm` uses it, in the generator's process (`Live`) and in the trainer's (`TheirSender`). vLLM's own transfer
is the NCCL engine of 0.22 to 0.27 (`start_weight_update`, `update_weights`, `finish_weight_update`), packed and not,
with its defaults, or on one GPU its IPC engine (`weights_vllm_ipc.py`); all of them pause generation the same way. It
needs GPUs; on a CPU only ours is measured.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import weights_vllm_ipc
from torch import Tensor
from weights_ends import MODELS, meta_model

from asyncrl.generation.vllm import VLLMEngine
from asyncrl.settings import load, resolve
from asyncrl.types import SamplingParams
from asyncrl.weights.gather import in_sending_order

REQUESTS = 128
PROMPT, RESPONSE = 64, 512
PAUSE_BOUND_S = 60.0


class Live:
    """A vLLM engine with dummy weights of a model's shapes, and the load on it."""

    def __init__(self, model: str, device: str, transfer: str) -> None:
        self._on_gpu, self._transfer = device != "cpu", transfer
        folder = Path(tempfile.mkdtemp(prefix="asyncrl-weights-"))
        save_shapes(model, folder / "model")
        own = {"run_dir": str(folder / "run"), "model.path": str(folder / "model"), "generation.engine": "vllm"}
        config = load(None, own)
        config.training.seq_len = PROMPT + RESPONSE + 1
        config.generation.max_concurrency = REQUESTS if self._on_gpu else 8
        if self._on_gpu:
            config.generation.vllm = {"gpu_memory_utilization": 0.6, "weight_transfer_config": {"backend": transfer}}
        self.engine = VLLMEngine(resolve(config), 0)
        self._vocabulary = MODELS[model]["vocab_size"]
        self._names = [(name, list(p.shape)) for name, p in in_sending_order(meta_model(model).named_parameters())]
        self._requests: list[asyncio.Task] = []
        self._connected = False

    async def obey(self, command: dict) -> dict[str, Any]:
        """load: keep requests running; rate: tokens per second for some seconds; theirs: receive by vLLM's transfer."""
        match command["do"]:
            case "load":
                count = REQUESTS if self._on_gpu else 8
                self._requests = [asyncio.create_task(self._request(seed)) for seed in range(count)]
                await self._rate(command["settle_s"])
                return {"requests": count}
            case "rate":
                return {"tokens_per_s": await self._rate(command["seconds"]), "loaded": self.engine.loaded}
            case "theirs":
                return await self._theirs(command["port"], packed=command["packed"])
        raise ValueError(f"unknown command {command}")

    async def idle(self) -> None:
        """End the load."""
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def _request(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while True:
            prompt = random.integers(4, self._vocabulary, PROMPT).tolist()
            length = int(random.integers(RESPONSE // 2, RESPONSE))
            await self.engine.generate(prompt, SamplingParams(max_tokens=length))

    async def _rate(self, seconds: float) -> float:
        before, began = self.engine.activity()["tokens"], time.perf_counter()
        await asyncio.sleep(seconds)
        for task in self._requests:
            if task.done():
                task.result()  # a dead engine ends the benchmark with its error
        return (self.engine.activity()["tokens"] - before) / (time.perf_counter() - began)

    async def _theirs(self, port: int, *, packed: bool) -> dict[str, float]:
        llm = self.engine._llm
        if not self._connected:
            await self._connect(port)
        began = time.perf_counter()
        self.engine._open.clear()
        await self.engine._none_adding.wait()
        await self.engine._pause(PAUSE_BOUND_S)
        paused = time.perf_counter()
        await llm.start_weight_update()
        starting = time.perf_counter()
        await self._update(packed=packed)
        updated = time.perf_counter()
        await llm.finish_weight_update()
        finished = time.perf_counter()
        await self.engine._resume()
        return {
            "update_s": updated - starting,
            "start_update_finish_s": finished - paused,
            "pause_s": time.perf_counter() - paused,
            "total_s": time.perf_counter() - began,
        }

    async def _connect(self, port: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        if self._transfer == "ipc":
            info = {}
            self._trainer = await asyncio.to_thread(weights_vllm_ipc.connect, port)
        await self.engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        self._connected = True

    async def _update(self, *, packed: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._transfer == "ipc":
            await weights_vllm_ipc.take(self.engine._llm, self._trainer)
            return
        update = WeightTransferUpdateRequest(update_info={
            "names": [name for name, _ in self._names], "shapes": [shape for _, shape in self._names],
            "dtype_names": ["bfloat16"] * len(self._names), "packed": packed,
        })  # fmt: skip
        await self.engine._llm.update_weights(update)


class TheirSender:
    """vLLM's trainer side."""

    def __init__(self, port: int) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._engine = NCCLWeightTransferEngine
        self._group = self._engine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})

    def send(self, tensors: dict[str, Tensor], *, packed: bool) -> float:
        """Seconds until everything has left, the wait for the receiver included."""
        began = time.perf_counter()
        self._engine.trainer_send_weights(iter(tensors.items()), {"group": self._group, "packed": packed})
        torch.cuda.synchronize()
        return time.perf_counter() - began


def save_shapes(model: str, folder: Path) -> None:
    """A Hugging Face folder without weights: a configuration, and a tokenizer with a word per token id."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    meta = meta_model(model)
    meta.config.architectures, meta.config.dtype = [type(meta).__name__], torch.bfloat16
    meta.config.save_pretrained(folder)
    words = {f"<{i}>": i for i in range(MODELS[model]["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<0>", pad_token="<1>", bos_token="<2>", eos_token="<3>"
    ).save_pretrained(folder)
