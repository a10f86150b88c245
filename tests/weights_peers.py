"""The processes of the weight tests: trainer ranks and generators, each driven through a pipe of JSON messages.

The engine here is a real, small one: it holds tensors, receives into a second copy and swaps the two. Faults are put
where they happen in life: in the function that loads what was received, at the group's door, and at commit.
"""

import asyncio
import hashlib
import os
import signal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from asyncrl.config import WeightsConfig
from asyncrl.types import Completion
from asyncrl.weights.follower import follow
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.sender import WeightSender

SHAPES = {
    "fsdp.embed.weight": (("rows", 40), torch.float32),  # tied with the head, larger than a bucket
    "fsdp.norm.weight": ((40,), torch.float32),
    "uneven": ((7, 3), torch.bfloat16),  # 3 ranks get 3, 3 and 1 rows
    "thin": ((2, 5), torch.float16),  # the last rank has no row
    "columns": ((6, 9), torch.float32),
    "replicated": ((11,), torch.float32),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
    "integers": ((5,), torch.int64),
    "flags": ((3,), torch.bool),
}
ROWS = 96
MANY_ROWS = 75_000
"""12 MB, which is more than the sockets between two processes can hold."""
TIED = {"fsdp.head.weight": "fsdp.embed.weight"}


def values(version, rows=ROWS):
    """Every tensor of `version`, under every name; the embedding has `rows` rows."""
    generator = torch.Generator().manual_seed(version + 100)
    made = {}
    for name, (shape, dtype) in SHAPES.items():
        shape = [rows if size == "rows" else size for size in shape]
        made[name] = torch.randint(-99, 99, shape, generator=generator).to(dtype)
    return made | {alias: made[name] for alias, name in TIED.items()}


def fingerprint(tensors):
    """What a generator holds, small enough for a pipe: name -> (dtype, shape, hash of the bytes)."""
    flat = {n: t.cpu().contiguous().view(-1).view(torch.uint8).numpy() for n, t in tensors.items()}
    return {n: [str(t.dtype), list(t.shape), hashlib.sha256(flat[n]).hexdigest()] for n, t in tensors.items()}


class Tied(nn.Module):
    """A language model's two ends, which share one weight."""

    def __init__(self, rows):
        super().__init__()
        self.embed = nn.Embedding(rows, 40)
        self.norm = nn.LayerNorm(40, bias=False)
        self.head = nn.Linear(40, 1, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


class Sharded:
    """A trainer's tensors: an FSDP module with tied weights, DTensors of several placements, and plain tensors."""

    def __init__(self, order, rows, device):
        mesh = init_device_mesh(device.split(":")[0], (dist.get_world_size(),))
        self.module = Tied(rows).to(device)
        fully_shard(self.module, mesh=mesh)
        placements = {"uneven": Shard(0), "thin": Shard(0), "columns": Shard(1), "replicated": Replicate()}
        first = values(0, rows)
        self.others = {
            n: distribute_tensor(t, mesh, [placements[n]], src_data_rank=None)
            if n in placements
            else t.to(device, copy=True)
            for n, t in first.items()
            if not n.startswith("fsdp.")
        }
        self.order, self.mesh, self.rows = order, mesh, rows

    def set(self, version):
        new, mine = values(version, self.rows), dict(self.tensors())
        with torch.no_grad():
            for name, tensor in mine.items():
                full = new[name]
                if hasattr(tensor, "placements"):
                    full = distribute_tensor(full, self.mesh, tensor.placements, src_data_rank=None)
                tensor.copy_(full)

    def tensors(self):
        pairs = [(f"fsdp.{n}", p) for n, p in self.module.named_parameters(remove_duplicate=False)]
        pairs += self.others.items()
        return sorted(pairs, key=lambda pair: pair[0], reverse=self.order == "reversed")


def trainer(pipe, rank, size, port, config, orders, rows, device):
    """Commands: set+publish a version, count newcomers, close; each rank answers each of them."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    model = Sharded(orders[rank], rows, device)
    sender = WeightSender(
        tensors=model.tensors, rank=rank, config=msgspec.convert(config, WeightsConfig), device=device
    )
    say(pipe, {"address": sender.address})
    while (command := hear(pipe))["do"] != "close":
        try:
            if command["do"] == "publish":
                model.set(command["version"])
                say(pipe, {"publishing": command["version"]})
                say(pipe, {"report": sender.publish(command["version"])})
            else:
                say(pipe, {"newcomers": sender.newcomers()})
        except RuntimeError as error:
            say(pipe, {"error": str(error)})
    sender.close()
    dist.destroy_process_group()
    say(pipe, {"closed": True})


class Holder:
    """An engine that holds tensors. A token it samples is the version it was sampled from."""

    def __init__(self, fault, device):
        self.version, self.num_weight_ranks = -1, fault.get("ranks", 1)
        self.held, self._staged = {}, {}
        self._receivers = [Receiver() for _ in range(self.num_weight_ranks)]
        self._fault, self._device = fault, device
        self.discarded = 0

    async def start(self):
        """Nothing to load: the first weights come from the trainer."""

    async def generate(self, prompt_ids, params):
        tokens = np.full(params.max_tokens, self.version, dtype=np.int32)
        return Completion(prompt_ids=np.array(prompt_ids, dtype=np.int32), token_ids=tokens, versions=tokens.copy(),
                          logprobs=np.zeros(len(tokens), dtype=np.float32), finish_reason="length")  # fmt: skip

    async def join_weights(self, spec):
        self._happen("join")
        early = self.num_weight_ranks == 1  # as vLLM
        joining = (
            asyncio.to_thread(r.join, spec, i, self._device, head_start=early) for i, r in enumerate(self._receivers)
        )
        await asyncio.gather(*joining)

    async def receive_weights(self, plan):
        self._staged = {}
        first, *others = await asyncio.gather(
            *(asyncio.to_thread(receiver.receive, plan, self._load) for receiver in self._receivers)
        )
        assert all(sums == first for sums in others)
        return first

    async def commit_weights(self, version):
        self._happen("commit")
        self.held, self._staged, self.version = self._staged, {}, version

    async def discard_weights(self):
        self._staged = {}
        self.discarded += 1

    def activity(self):
        return {"tokens": 0.0, "requests": 0.0, "busy_s": 0.0, "pause_s": 0.0}

    async def close(self):
        for receiver in self._receivers:
            receiver.leave()

    def _load(self, tensors):
        for name, tensor in tensors:
            if name == "integers" and self._fault.get("at") == "corrupt":
                tensor.view(torch.uint8)[3] ^= 16
                self._fault = {}
            self._staged[name] = tensor.clone()
        self._happen("load")

    def _happen(self, where):
        """kill -9, SIGSTOP or an exception, in the place and version the test asked for: once, unless `always`."""
        fault = self._fault
        if fault.get("at") != where or fault.get("after", -1) > self.version:
            return
        if not fault.get("always"):
            self._fault = {}
        if "signal" in fault:
            os.kill(os.getpid(), fault["signal"])
        else:
            raise OSError(fault["error"])


def generator(pipe, address, index, incarnation, config, fault, device):
    """Follows until told to stop; says each version it came to serve; shows what it holds when asked."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(_generate(pipe, address, index, incarnation, msgspec.convert(config, WeightsConfig), fault, device))


async def _generate(pipe, address, index, incarnation, config, fault, device):
    engine = Holder(fault, device)
    following = asyncio.create_task(
        follow(
            address,
            engine,
            index=index,
            incarnation=incarnation,
            config=config,
            on_version=lambda version: say(pipe, {"version": version}),
        )
    )
    asking = asyncio.create_task(_answer(pipe, engine))
    done, _ = await asyncio.wait({following, asking}, return_when=asyncio.FIRST_COMPLETED)
    following.cancel()
    result = (await asyncio.gather(following, return_exceptions=True))[0]
    await engine.close()
    ended = "" if isinstance(result, asyncio.CancelledError) else repr(result)
    say(pipe, {"ended": ended, "discarded": engine.discarded, "version": engine.version})
    if asking not in done:
        asking.cancel()


async def _answer(pipe, engine):
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        if not pipe.poll():  # told twice of one message
            continue
        if hear(pipe)["do"] == "stop":
            loop.remove_reader(pipe.fileno())
            return
        say(pipe, {"held": fingerprint(engine.held), "serves": engine.version, "discarded": engine.discarded})


def say(pipe, message):
    pipe.send_bytes(msgspec.json.encode(message))


def hear(pipe):
    return msgspec.json.decode(pipe.recv_bytes())
