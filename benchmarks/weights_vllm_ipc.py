"""vLLM's own transfer within one GPU in `weights.py --one-gpu`: its CUDA IPC engine, packed and not.

Its trainer's side calls back with what vLLM shall be told; here that goes to the generator's process through a local
connection, where over HTTP it would be a request. The handles are pickled as vLLM does it for HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from dataclasses import asdict
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor

KEY = b"weights"
BOUND_S = 120.0


class TheirSender:
    """vLLM's trainer side."""

    def __init__(self, port: int) -> None:
        with Listener(("127.0.0.1", port), authkey=KEY) as listener:
            self._generator = listener.accept()

    def send(self, tensors: dict[str, Tensor], *, packed: bool) -> float:
        """Seconds until the receiver has taken everything."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

        began = time.perf_counter()
        how = IPCTrainerSendWeightsArgs(send_mode=self._tell, packed=packed)
        IPCWeightTransferEngine.trainer_send_weights(iter(tensors.items()), how)
        self._generator.send(None)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def _tell(self, info: Any) -> None:
        fields = {key: value for key, value in asdict(info).items() if value is not None}
        fields["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(fields.pop("ipc_handles"))).decode()
        self._generator.send(fields)
        if not self._generator.poll(BOUND_S):
            raise TimeoutError("vLLM did not take its weights")
        self._generator.recv()


def connect(port: int) -> Connection:
    """The generator's end of what a TheirSender opens."""
    deadline = time.monotonic() + BOUND_S
    while True:
        try:
            return Client(("127.0.0.1", port), authkey=KEY)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


async def take(llm: Any, trainer: Connection) -> None:
    """Load every part that the trainer tells of, and say so."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    while (fields := await asyncio.to_thread(trainer.recv)) is not None:
        await llm.update_weights(WeightTransferUpdateRequest(update_info=fields))
        trainer.send(True)
