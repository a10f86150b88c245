"""The rollout loop against a real replay server, a real engine and real reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from generation_runs import make_run, serving

from asyncrl.chat import Chat
from asyncrl.generation.engine import EngineDead
from asyncrl.generation.generate import EngineGenerate, Limits, TooLong, hash64
from asyncrl.generation.local import LocalEngine
from asyncrl.generation.rewards import RewardPool
from asyncrl.generation.rollout import RolloutLoop
from asyncrl.models import build_model, load_tokenizer
from asyncrl.replay.async_client import AsyncReplayClient
from asyncrl.replay.client import ReplayClient
from asyncrl.types import Group

torch.set_num_threads(1)


def tiny_engine(**settings) -> LocalEngine:
    return LocalEngine(lambda: build_model("tiny", dtype=torch.float32), max_length=256, **settings)


def train(address: str, steps: int, batch_size: int, serve: Callable[[int], None]) -> tuple[list[list[Group]], dict]:
    """A trainer that trains nothing: takes `steps` batches, serves a new version after each, then ends the run."""
    client = ReplayClient(address, role="trainer")
    client.publish(version=0, step=0)
    batches = []
    for step in range(1, steps + 1):
        taken = client.take(step=step, num_groups=batch_size, version=step - 1, timeout_s=90)
        batches.append(taken.groups)
        serve(step)
        client.publish(version=step, step=step)
    client.finish("done")
    client.close()
    return batches, taken.metrics


def run_loop(run, steps: int, *, engine: LocalEngine | None = None, workers: int = 1):
    """Generate for a whole run in this process; returns the batches and the last metrics."""

    async def go(address):
        client = AsyncReplayClient(address)
        serve, here = engine or tiny_engine(), asyncio.get_running_loop()
        limit_s = run.config.generation.reward_timeout_s
        pool = RewardPool(run.dir, num_workers=workers, timeout_s=limit_s, start_timeout_s=60)
        await asyncio.gather(serve.start(), pool.start(), client.hello())
        loop = RolloutLoop(
            engine=serve, env=run.env, algo=run.algo, client=client, chat=Chat(tokenizer=load_tokenizer("tiny")),
            config=run.config, score=pool.score,
        )  # fmt: skip

        def new_version(version: int) -> None:
            weights = build_model("tiny", dtype=torch.float32).named_parameters()
            asyncio.run_coroutine_threadsafe(serve.load_weights(weights, version), here).result(60)

        try:
            trained = asyncio.to_thread(train, address, steps, run.config.training.batch_size, new_version)
            return (await asyncio.gather(trained, loop.run()))[0]
        finally:
            await pool.close()
            await serve.close()
            client.close()

    with serving(run) as address:
        return asyncio.run(asyncio.wait_for(go(address), 120))


def test_every_group_that_comes_out_is_whole_in_order_and_scored(tmp_path):
    run = make_run(tmp_path, "good", "named", training__steps=4)
    batches, metrics = run_loop(run, 4)
    groups = [g for batch in batches for g in batch]
    assert [g.prompt.id for g in groups] == list(range(8))
    assert metrics["ledger/balance"] == 0
    for group in groups:
        assert len(group.episodes) == 2
        for e in group.episodes:
            assert load_tokenizer("tiny").decode(e.prompt_ids) == group.prompt.prompt
            assert e.loss_mask.all()
            assert 1 <= len(e.token_ids) <= 8
            assert e.rewards == ({"half": 0.5, "quarter": 0.25} if group.prompt.metadata["kind"] == "named" else {})
            assert e.reward == sum(e.rewards.values()) or not e.rewards


FAILURES = {
    "raise": "reward_error", "nan": "reward_error", "text": "reward_error", "none": "reward_error",
    "crash": "reward_error", "long": "too_long", "explode": "rollout_error", "nothing": "rollout_error",
    "garbled": "rollout_error", "mute": "rollout_error",
    "impatient": "rollout_error", "crooked": "rollout_error", "object": "rollout_error",
}  # fmt: skip


def dropped(metrics: dict[str, float]) -> dict[str, float]:
    """Groups dropped by reason, those that occurred."""
    return {name.removeprefix("dropped/"): n for name, n in metrics.items() if name.startswith("dropped/") and n}


def test_whatever_goes_wrong_in_a_rollout_is_a_drop_with_its_reason_and_the_run_goes_on(tmp_path):
    run = make_run(tmp_path, "good", *FAILURES, training__steps=1, training__seq_len=64)
    batches, metrics = run_loop(run, 1)
    assert [g.prompt.id for g in batches[0]] == [0, len(FAILURES) + 1]
    assert dropped(metrics) == {reason: list(FAILURES.values()).count(reason) for reason in set(FAILURES.values())}
    assert metrics["ledger/balance"] == 0
    assert metrics["ledger_tokens/dropped"] > 0


def test_a_rollout_or_a_reward_that_never_ends_is_dropped_in_time_and_the_run_goes_on(tmp_path):
    run = make_run(
        tmp_path, "slow", "hang", "good", training__steps=1, training__batch_size=1, replay__target_lag=0,
        generation__reward_timeout_s=2.0, generation__rollout_timeout_s=8.0,
    )  # fmt: skip
    batches, metrics = run_loop(run, 1, workers=2)
    assert [g.prompt.metadata["kind"] for g in batches[0]] == ["good"]
    assert dropped(metrics).keys() == {"rollout_timeout", "reward_timeout"}
    assert metrics["ledger/balance"] == 0


def test_a_group_that_the_algorithm_does_not_keep_is_dropped_as_filtered(tmp_path):
    run = make_run(tmp_path, "good", algo__dynamic_sampling=True, training__steps=3)
    batches, metrics = run_loop(run, 3)
    assert all(np.ptp(g.rewards_G) > 0 for batch in batches for g in batch)
    assert metrics["dropped/filtered"] > 0
    assert metrics["bias/dropped_length"] > 0


def test_what_is_sampled_does_not_depend_on_how_much_runs_at_once(tmp_path):
    def outcome(folder, **overrides):
        run = make_run(folder, "good", training__steps=6, **overrides)
        batches, _ = run_loop(run, 6, engine=tiny_engine(max_concurrency=run.config.generation.max_concurrency))
        return [
            (g.prompt.id, e.token_ids.tolist(), e.logprobs.tobytes(), e.reward)
            for batch in batches
            for g in batch
            for e in g.episodes
        ]

    narrow = outcome(tmp_path / "a", generation__max_concurrency=1, replay__target_lag=0)
    assert narrow == outcome(tmp_path / "b", generation__max_concurrency=40, replay__target_lag=2)
    assert len({tuple(tokens) for _, tokens, _, _ in narrow}) > 20


def test_a_generator_that_missed_a_sync_waits_for_its_leases_version(tmp_path):
    """Its groups would be older than their leases, and each would be leased again in vain."""
    run = make_run(tmp_path, "good", training__steps=3)
    engine = tiny_engine()

    async def go(address):
        client, trainer = AsyncReplayClient(address), ReplayClient(address, role="trainer")
        pool = RewardPool(run.dir, num_workers=1, timeout_s=9, start_timeout_s=60)
        await asyncio.gather(engine.start(), pool.start(), client.hello())
        trainer.publish(version=1, step=0)
        loop = RolloutLoop(
            engine=engine, env=run.env, algo=run.algo, client=client, chat=Chat(tokenizer=load_tokenizer("tiny")),
            config=run.config, score=pool.score,
        )  # fmt: skip
        running = asyncio.create_task(loop.run())
        try:
            while not client._held:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)  # the group has begun
            assert engine.activity()["requests"] == 0
            await engine.load_weights(build_model("tiny", dtype=torch.float32).named_parameters(), 1)
            size = run.config.training.batch_size
            taken = await asyncio.to_thread(trainer.take, step=1, num_groups=size, version=1, timeout_s=60)
            trainer.finish("done")
            await running
        finally:
            await pool.close()
            await engine.close()
            client.close()
            trainer.close()
        return taken

    with serving(run) as address:
        taken = asyncio.run(asyncio.wait_for(go(address), 90))
    assert "dropped/stale" not in taken.metrics
    assert {int(v) for g in taken.groups for e in g.episodes for v in e.versions[e.loss_mask]} == {1}


def test_the_engines_death_is_not_data_but_the_end(tmp_path):
    run = make_run(tmp_path, "good", training__steps=3)
    engine = tiny_engine()

    async def go(address):
        client = AsyncReplayClient(address)
        pool = RewardPool(run.dir, num_workers=1, timeout_s=9, start_timeout_s=60)
        trainer = ReplayClient(address, role="trainer")
        trainer.publish(version=0, step=0)
        await asyncio.gather(engine.start(), pool.start(), client.hello())
        broken = [(n, p.detach() * torch.nan) for n, p in build_model("tiny", dtype=torch.float32).named_parameters()]
        await engine.load_weights(broken, 1)
        loop = RolloutLoop(
            engine=engine, env=run.env, algo=run.algo, client=client, chat=Chat(tokenizer=load_tokenizer("tiny")),
            config=run.config, score=pool.score,
        )  # fmt: skip
        try:
            with pytest.raises(ExceptionGroup) as caught:
                await loop.run()
            assert caught.value.subgroup(EngineDead)
        finally:
            await pool.close()
            await engine.close()
            client.close()
            trainer.close()

    with serving(run) as address:
        asyncio.run(asyncio.wait_for(go(address), 60))


def test_a_prompt_that_leaves_no_room_for_the_response_is_too_long():
    generate = EngineGenerate(
        engine=tiny_engine(), chat=Chat(tokenizer=load_tokenizer("tiny")), seed=(0,), scorer=None,
        limits=Limits(max_tokens=10, seq_len=20, temperature=1.0),
    )  # fmt: skip
    with pytest.raises(TooLong, match=r"prompt of 11 tokens plus a response of up to 10 exceeds training\.seq_len 20"):
        asyncio.run(generate([5] * 11))


def test_seeds_differ_by_episode_and_by_call_and_never_by_process():
    assert hash64(0, 1, 2, 3) == 11471224807254672730
    assert len({hash64(s, p, g, c) for s in range(3) for p in range(9) for g in range(8) for c in range(3)}) == 648
