"""The reward pool: whatever a score does, its response gets an answer in time and the next one a fair chance."""

from __future__ import annotations

import asyncio
import re

import psutil
import pytest
from generation_runs import make_run

from asyncrl.generation.reward_worker import MAX_BYTES, length
from asyncrl.generation.rewards import RewardError, RewardPool, RewardTimeout
from asyncrl.types import Prompt


def use_pool(folder, use, *, num_workers: int = 1, timeout_s: float = 20.0):
    make_run(folder, "good")

    async def go():
        pool = RewardPool(folder, num_workers=num_workers, timeout_s=timeout_s, start_timeout_s=60)
        try:
            await pool.start()
            return await asyncio.wait_for(use(pool), 100)
        finally:
            await asyncio.wait_for(pool.close(), 20)

    return asyncio.run(go())


def of(kind: str) -> Prompt:
    return Prompt(id=3, prompt="", metadata={"kind": kind})


def test_numbers_named_numbers_and_async_scores_come_back(tmp_path):
    async def use(pool):
        assert await pool.score("abc", of("good")) == 1.0
        assert await pool.score("ab", of("good")) == 0.0
        assert await pool.score("", of("named")) == {"half": 0.5, "quarter": 0.25}
        assert await pool.score("abcd", of("async")) == 4.0
        assert await pool.score("\x00 é \U0001f600", of("print")) in (0.0, 1.0)

    use_pool(tmp_path, use)


def test_a_score_that_is_no_reward_is_an_error_that_says_what_came(tmp_path):
    async def use(pool):
        for kind, message in (
            ("nan", "must be finite, got nan"),
            ("text", "must be a number, got str '1.0'"),
            ("none", "must be a number, got NoneType"),
            ("raise", "KeyError: 'no such answer'"),
        ):
            with pytest.raises(RewardError, match=re.escape(message)):
                await pool.score("", of(kind))
            assert await pool.score("abc", of("good")) == 1.0

    use_pool(tmp_path, use)


def test_a_score_that_ends_its_process_fails_alone(tmp_path):
    async def use(pool):
        with pytest.raises(RewardError, match="ended its process with code 7"):
            await pool.score("", of("crash"))
        assert await pool.score("abc", of("good")) == 1.0

    use_pool(tmp_path, use)


def test_a_score_that_hangs_is_killed_and_its_worker_replaced(tmp_path):
    async def use(pool):
        with pytest.raises(RewardTimeout, match="longer than 2 s"):
            await pool.score("", of("hang"))
        assert await pool.score("abc", of("good")) == 1.0
        async with asyncio.timeout(30):
            while len(workers()) != 1:  # the killed one may take a moment to be gone
                await asyncio.sleep(0.01)

    use_pool(tmp_path, use, timeout_s=2.0)
    assert not workers()


def test_a_caller_that_is_cancelled_does_not_shift_the_answers_of_others(tmp_path):
    async def use(pool):
        first = asyncio.create_task(pool.score("abcd", of("async")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        scores = await asyncio.gather(*(pool.score("a" * n, of("async")) for n in range(20)))
        assert scores == [float(n) for n in range(20)]

    use_pool(tmp_path, use)


def test_a_pool_whose_environment_cannot_be_built_does_not_start(tmp_path):
    make_run(tmp_path, "good")
    (tmp_path / "config.yaml").write_text("env: {name: no_such_env}")

    async def go():
        pool = RewardPool(tmp_path, num_workers=1, timeout_s=5, start_timeout_s=60)
        with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="did not start")):
            await pool.start()
        await pool.close()

    asyncio.run(asyncio.wait_for(go(), 90))


def test_a_message_that_announces_a_hostile_size_is_refused():
    with pytest.raises(ValueError, match="at most"):
        length((MAX_BYTES + 1).to_bytes(4, "little"))


def workers() -> list[psutil.Process]:
    """Reward workers that this process started and that still live."""
    return [p for p in psutil.Process().children() if _is_worker(p)]


def _is_worker(process: psutil.Process) -> bool:
    """Other tests may have left a fork server, which is a child as well."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "asyncrl.generation.reward_worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
