"""A replay server that is started again elsewhere: whoever knows the run folder finds it there."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from replay_helpers import make_run, serving

from asyncrl.replay import server
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient


def test_clients_that_live_on_and_one_that_starts_find_a_server_that_has_moved(tmp_path: Path):
    run = make_run(str(tmp_path), training={"batch_size": 1, "steps": 9}, target_lag=0)
    where = partial(server.read_address, tmp_path, timeout_s=0.0)

    async def work() -> None:
        with serving(run) as first:
            server.write_address(tmp_path, first.address)
            generator = AsyncReplayClient(where)
            await generator.hello()
            trainer = await asyncio.to_thread(lambda: ReplayClient(where, role="trainer"))
            await asyncio.to_thread(lambda: trainer.rewind(step=0, version=0))
        late = ReplayClient(where, role="status")  # the address it reads is of the server that has ended
        leases = asyncio.ensure_future(generator.lease(1))
        published = asyncio.ensure_future(asyncio.to_thread(lambda: trainer.publish(version=0, step=0)))
        looked = asyncio.ensure_future(asyncio.to_thread(late.status))
        await asyncio.sleep(0)  # they have asked
        with serving(run) as second:
            assert second.address != first.address
            server.write_address(tmp_path, second.address)
            await published
            assert [lease.prompt.id for lease in await leases] == [0]
            assert (await looked)["run"] == "run"
            for client in (trainer, late):
                assert client.address == second.address
                client.close()
            generator.close()

    asyncio.run(asyncio.wait_for(work(), 60))
