"""A bad network between the clients and the server: messages are delayed, doubled, swapped, damaged and lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from replay_helpers import make_group, make_run, serving

from asyncrl.replay import exchange as exchange_module
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient


class Network(threading.Thread):
    """A ROUTER that passes whole messages on, one DEALER per client, and misbehaves with a seed."""

    def __init__(self, server: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.rng, self.server, self.stop = random.Random(seed), server, threading.Event()
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.front.bind_to_random_port('tcp://127.0.0.1')}"
        self.kept: list[tuple[zmq.Socket, list[bytes]]] = []
        self.mischief = 0

    def run(self) -> None:
        poller, backs = zmq.Poller(), {}
        poller.register(self.front, zmq.POLLIN)
        while not self.stop.is_set():
            for socket, _ in poller.poll(50):
                frames = socket.recv_multipart()
                if socket is self.front:
                    if frames[0] not in backs:
                        backs[frames[0]] = self.context.socket(zmq.DEALER)
                        backs[frames[0]].connect(self.server)
                        poller.register(backs[frames[0]], zmq.POLLIN)
                    self.pass_on(backs[frames[0]], frames[1:], header=0)
                else:
                    identity = next(i for i, back in backs.items() if back is socket)
                    self.pass_on(self.front, [identity, *frames], header=1)
        self.context.destroy(0)

    def pass_on(self, to: zmq.Socket, frames: list[bytes], header: int) -> None:
        accident = self.rng.random()
        self.mischief += accident < 0.3
        if accident < 0.06:
            return
        if accident < 0.12:
            self.kept.append((to, frames))
            return
        if accident < 0.18:
            to.send_multipart(frames)
        elif accident < 0.24:
            damaged = bytearray(frames[header])
            damaged[self.rng.randrange(4)] ^= 1 << self.rng.randrange(8)
            frames = [*frames[:header], bytes(damaged), *frames[header + 1 :]]
        to.send_multipart(frames)
        if self.kept and accident > 0.9:
            other, late = self.kept.pop(self.rng.randrange(len(self.kept)))
            other.send_multipart(late)


@contextmanager
def bad_network(server: str, seed: int) -> Iterator[Network]:
    network = Network(server, seed)
    network.start()
    try:
        yield network
    finally:
        network.stop.set()
        network.join(5)


@pytest.mark.parametrize("seed", range(3))
def test_every_prompt_is_trained_once_over_a_bad_network(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "ASK_AGAIN_S", 0.1)
    run = make_run(str(tmp_path), training={"batch_size": 4, "steps": 8}, target_lag=1)
    with serving(run) as made, bad_network(made.address, seed) as network:
        trainer = ReplayClient(network.address, role="trainer")
        trainer.publish(version=0, step=0)

        async def generate(index: int) -> None:
            client = AsyncReplayClient(network.address, index=index)
            await client.hello()
            while leases := await client.lease(2):
                for lease in leases:
                    group = make_group(lease.id, versions=[lease.version] * 2, prompt_id=lease.prompt.id)
                    assert await client.insert(group)
                await client.heartbeat({})
            client.close()

        async def main() -> list[int]:
            async with asyncio.timeout(60):
                generators = [asyncio.create_task(generate(i)) for i in range(2)]
                prompts = []
                for step in range(1, 9):
                    taken = await asyncio.to_thread(
                        trainer.take, step=step, num_groups=4, version=step - 1, timeout_s=30
                    )
                    prompts += [g.prompt.id for g in taken.groups]
                    await asyncio.to_thread(trainer.publish, version=step, step=step)
                await asyncio.to_thread(trainer.finish, "done")
                await asyncio.gather(*generators)
                return prompts

        assert sorted(asyncio.run(main())) == list(range(32))
        status = trainer.status()
        assert status["ledger"]["ledger/balance"] == 0
        assert status["ledger"]["ledger/trained"] == 32
        assert network.mischief > 20
        trainer.close()
