"""Hostile bytes against the wire decoder and the server's state machine.

    python benchmarks/fuzz.py [--inputs 1000000] [--seed 0] [--smoke]

Half of the inputs are decoded (requests, replies, groups): noise, and valid messages with bytes flipped, cut,
repeated or spliced. The other half goes to a real service: valid requests in senseless order with senseless numbers,
from a few incarnations, some damaged; some of the groups lie in files, at places that are true or not. What may happen:
a value, a ValueError, a refusal. Anything else (another exception, a ledger that does not close, a broken structure, a
batch whose groups are not where it says, memory that grows by more than 64 MB) ends the script with the input's number
and the seed. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil

from asyncrl.config import ReplayConfig, TrainingConfig
from asyncrl.replay import messages, spool, wire
from asyncrl.replay.buffer import Buffer
from asyncrl.replay.ledger import EndlessRejection
from asyncrl.replay.limiter import make_limits
from asyncrl.replay.seal import digest_of, seal, unseal
from asyncrl.replay.service import Service
from asyncrl.replay.spool import Files, Writer, gather
from asyncrl.replay.store import Store
from asyncrl.types import Episode, Group, Prompt

ALLOWED_GROWTH_BYTES = 64 << 20
spool.LEAST_BYTES, spool.SEGMENT_BYTES = 0, 4096  # a file holds some of the small groups here
INCARNATIONS = ["a" * 16, "b" * 16, "c" * 16]
"""Generators, and a trainer."""


def prompts(start: int) -> Iterator[Prompt]:
    while True:
        yield Prompt(id=start, prompt="p", target={"a": [1, None]})
        start += 1


def make_group(rng: random.Random, lease_id: int, live: int = 0) -> Group:
    version = live if rng.random() < 0.99 else rng.choice([-1, 0, 1, 2, 2**31 - 1])
    n = rng.randint(0, 5)
    episodes = [
        Episode(
            prompt_ids=np.arange(2, dtype=np.int32),
            token_ids=np.arange(n, dtype=np.int32),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, version, np.int32),
            loss_mask=np.ones(n, bool),
            reward=rng.choice([0.0, 1.0, float("nan"), float("inf")]),
            finish_reason="stop",
            text="é" * rng.randint(0, 3),
        )
        for _ in range(rng.randint(1, 3))
    ]
    return Group(lease_id=lease_id, prompt=Prompt(id=0, prompt="p"), episodes=episodes)


def damage(rng: random.Random, data: bytes) -> bytes:
    """One to four accidents."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(5):
            case 0 if at < len(found):
                found[at] = rng.choice([0, 0x7F, 0x80, 0xC1, 0xDC, 0xDD, 0xDF, 0xFF, rng.randrange(256)])
            case 1:
                del found[at:]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                found[at:at] = found[: rng.randint(0, 32)]
            case _:
                found[at : at + rng.randint(1, 8)] = b""
    return bytes(found)


def number(rng: random.Random) -> int:
    return rng.choice([0, 0, 1, 1, 2, 3, rng.randint(0, 40), -1, 2**31, 2**63 - 1, -(2**63)])


def request(rng: random.Random, step: int = 0, leases: Sequence[int] = (0,)) -> messages.Request:
    """Any request, with any numbers; some make sense after so many steps, with these leases."""
    n = lambda: number(rng)  # noqa: E731
    return rng.choice(
        [
            lambda: messages.Hello(pid=n()),
            lambda: messages.AskLease(n=n()),
            lambda: messages.AskLease(n=1),
            lambda: messages.Insert(lease_id=n()),
            lambda: messages.Insert(lease_id=rng.choice(leases)),
            lambda: messages.Insert(lease_id=rng.choice(leases)),
            lambda: messages.Drop(
                lease_id=n(), reason=rng.choice(["filtered", "aborted", "", "x" * 99]), num_tokens=n()
            ),
            lambda: messages.Heartbeat(activity={"busy_s": float(n()), "": float("nan")}, held=[n(), n()]),
            lambda: messages.Lookup(key=str(n())),
            lambda: messages.Announce(key=str(n()), value="v"),
            lambda: messages.Take(step=n(), num_groups=rng.choice([2, 2, n()]), version=n()),
            lambda: messages.Take(step=step + 1, num_groups=2, version=step, by_place=rng.random() < 0.5),
            lambda: messages.AskLease(n=2),
            lambda: messages.Insert(lease_id=rng.choice(leases)),
            lambda: messages.Publish(version=n(), step=n()),
            lambda: messages.Publish(version=step, step=step),
            lambda: messages.Forget(step=n()),
            lambda: messages.Status(),
            lambda: messages.Leave(),
            lambda: messages.Again(),
        ]
    )()


def decode(rng: random.Random, seeds: list[bytes], group: list[bytes]) -> str:
    """One input to the decoders; the name of what came of it."""
    data = rng.randbytes(rng.randint(0, 60)) if rng.random() < 0.2 else damage(rng, rng.choice(seeds))
    frames = [damage(rng, f) if rng.random() < 0.3 else f for f in group]
    read = rng.choice(
        [
            lambda: wire.unpack_request(data),
            lambda: wire.unpack_reply(data),
            lambda: wire.unpack_group(frames),
            lambda: wire.unpack_group([data, *frames[1:]]),
        ]
    )
    try:
        read()
    except ValueError:
        return "refused by the decoder"
    return "decoded"


class Machine:
    """A service, and clients without manners."""

    def __init__(self, rng: random.Random, files: Files) -> None:
        self.files, self.folder = files, Path(files.offer.folder)
        self.writers = {who: Writer(self.folder, who) for who in INCARNATIONS}
        self.rng, self.now, self.seq, self.steps = rng, 0.0, 0, 0
        limits = make_limits(ReplayConfig(target_lag=1, max_filtered=10**6), TrainingConfig(batch_size=2, steps=10**6))
        buffer = Buffer(limits=limits, prompts=prompts(0))
        self.service = Service(
            buffer=buffer,
            incarnation="server",
            rewind=lambda step: buffer,
            forget=lambda step, buffer: None,
            store=Store(files=files),
        )

    def step(self) -> str:
        rng, service = self.rng, self.service
        incarnation = rng.choice(INCARNATIONS)
        own = [s.lease_id for s in service.buffer.leased.values() if s.owner == incarnation]
        body = request(rng, service.buffer.step, own or (0,))
        self.seq += 1
        seq = self.seq if rng.random() < 0.9 else max(0, self.seq - rng.randint(0, 20))
        role = "trainer" if incarnation == INCARNATIONS[2] else "generator"
        acked = rng.choice([0, 0, max(0, seq - 5), seq, number(rng)])
        payload: list[bytes] = []
        if isinstance(body, messages.Insert):
            payload = [bytes(f) for f in wire.pack_group(make_group(rng, body.lease_id, service.buffer.live_version))]
            if rng.random() < 0.5:
                body, payload = self.leave(incarnation, body, payload), []
        envelope = wire.Envelope(incarnation, seq, acked, role, rng.randint(0, 1), body)
        header, rest = unseal(wire.pack_message(envelope, payload))
        frames = [bytes(header), *map(bytes, rest.frames)]
        if rng.random() < 0.2:
            at = rng.randrange(len(frames))
            frames[at] = damage(rng, frames[at])
        if rng.random() < 0.99:  # sealed after the damage: what somebody sends on purpose
            frames[0] += seal(frames[0], [digest_of(f) for f in frames[1:]])
        malformed = service.malformed
        self.now += rng.choice([0.0, 0.0, 0.1, 100.0])
        try:
            service.handle(b"id", frames, self.now)
            service.settle(self.now)
            service.tick(self.now)
        except EndlessRejection:
            return "ended by name"
        except RuntimeError as error:  # the bound that a lying client broke, or nobody left: ends the run, by name
            if type(error).__name__ not in ("StalenessExceeded", "NoGenerators"):
                raise
            return "ended by name"
        finally:
            self.check()
            self.read(incarnation, body, seq)
        service.outbox.clear()
        service.buffer.changes.clear()
        self.steps = max(self.steps, service.buffer.step)
        return "unreadable" if service.malformed > malformed else "answered or parked"

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        self.files.sweep(set(), lambda who: False)

    def leave(self, who: str, body: messages.Insert, packed: list[bytes]) -> messages.Insert:
        """The group in a file instead; the place may be a lie."""
        rng, writer = self.rng, self.writers[who]
        place = writer.append(packed)
        assert place is not None
        writer.answered(place)  # nothing of it is sent again but what a reply was kept of
        while rng.random() < 0.2:
            lies = {"segment": number(rng), "offset": number(rng), "length": number(rng), "header": number(rng)}
            lies |= {"owner": rng.choice([*INCARNATIONS, "", "../x"]), "digests": [b"", bytes(16)]}
            name = rng.choice(list(lies))
            place = msgspec.structs.replace(place, **{name: lies[name]})
        return messages.Insert(lease_id=body.lease_id, place=place, full=writer.ask())

    def read(self, who: str, body: messages.Request, seq: int) -> None:
        """What a batch refers to has to be there as it was written; what is unused is written over."""
        unused: list[int] = []
        for _, frames in self.service.outbox:
            header, payload = unseal(frames)
            envelope = wire.unpack_reply(header)
            if isinstance(envelope.body, messages.Taken) and envelope.body.places:
                groups = gather(self.folder, envelope.body.places, payload.frames)
                assert len(groups) == 2 * envelope.body.num_groups
            if isinstance(envelope.body, messages.Done) and envelope.seq == seq == self.seq:
                unused = envelope.body.unused
        if isinstance(body, messages.Insert) and body.place is not None:
            self.writers[who].told(body.full, unused)

    def check(self) -> None:
        accounts, buffer = self.service.buffer.accounts(), self.service.buffer
        assert accounts["ledger/balance"] == 0, accounts
        assert accounts["ledger_tokens/balance"] == 0, accounts
        assert buffer.outstanding == sum(not s.used_up for s in buffer.line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="2,000 inputs")
    args = parser.parse_args()
    inputs = 2000 if args.smoke else args.inputs
    rng, outcomes, process = random.Random(args.seed), Counter[str](), psutil.Process()
    seeds = [
        bytes(unseal(wire.pack_message(wire.Envelope("a", 1, 0, "generator", 0, request(rng))))[0]) for _ in range(100)
    ] + [
        bytes(unseal(wire.pack_message(wire.ReplyEnvelope("s", 1, reply)))[0])
        for reply in (messages.Done(), messages.Taken(num_groups=2, version=1, metrics={"a": 1.0}), messages.Resend())
    ]
    group = [bytes(f) for f in wire.pack_group(make_group(rng, 3))]
    files = Files()
    machine, start, before = Machine(rng, files), time.perf_counter(), 0
    steps = 0
    for i in range(inputs):
        try:
            outcome = decode(rng, seeds, group) if i % 2 else machine.step()
        except BaseException:
            print(f"input {i} of seed {args.seed} did harm")
            raise
        outcomes[outcome] += 1
        steps = max(steps, machine.steps)
        if outcome == "ended by name" or i % 20_000 == 0:
            machine.close()
            machine = Machine(rng, files)
        if i == min(20_000, inputs // 2):
            before = process.memory_info().rss
    files.close()
    grown = process.memory_info().rss - before
    if grown > ALLOWED_GROWTH_BYTES:
        raise SystemExit(f"memory grew by {grown / 1e6:.0f} MB")
    elapsed = time.perf_counter() - start
    for outcome, count in outcomes.most_common():
        print(f"{outcome:>24} {count:>9}")
    result = {
        "benchmark": "fuzz",
        "inputs": inputs,
        "seed": args.seed,
        "seconds": round(elapsed, 1),
        "longest_run_steps": steps,
    }
    print(json.dumps(result | {"grown_mb": round(grown / 1e6, 1), "outcomes": dict(outcomes)}))


if __name__ == "__main__":
    main()
