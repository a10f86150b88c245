"""Weights that come a second time: after an attempt that broke, and from a trainer that was resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

from vllm_support import (  # noqa: E402  (needs vLLM)
    Stage,
    abortive_sync,
    k3,
    peaked_model,
    prompts,
    sampling,
    score,
)

from asyncrl.types import Completion  # noqa: E402
from asyncrl.weights.sender import WeightSender  # noqa: E402


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("run"))
    yield made
    made.close()


async def sample(stage: Stage, ids: list[list[int]], tokens: int) -> list[Completion]:
    return await asyncio.gather(*(stage.engine.generate(p, sampling(tokens)) for p in ids))


def assert_sampled_from(model: Any, done: list[Completion]) -> None:
    ours = np.concatenate([s.alone for s in score(model, done)])
    assert k3(np.concatenate([c.logprobs for c in done]), ours) < 1e-3


@pytest.mark.parametrize("num_buckets", [1, 4], ids=["no v", "no up"])
def test_half_of_a_fused_layer_is_received_anew(stage: Stage, num_buckets: int) -> None:
    async def scenario() -> tuple[Any, list[Completion]]:
        await stage.publish(peaked_model(1))
        with pytest.raises(Exception, match="the test gave up"):  # an RPC keeps but the text
            await abortive_sync(stage, 1000 + num_buckets, num_buckets)
        model = peaked_model(2)
        await stage.publish(model)
        return model, await sample(stage, prompts(6, 20), 24)

    assert_sampled_from(*stage.run(scenario()))


def test_other_weights_under_a_version_served_before_meet_no_cache_of_it(stage: Stage) -> None:
    ids = prompts(2, 400)

    async def scenario() -> tuple[Any, list[Completion]]:
        version = await stage.publish(peaked_model(3))
        await sample(stage, ids, 8)
        await asyncio.to_thread(resume_trainer, stage)
        stage.version = version - 1
        model = peaked_model(4)
        assert await stage.publish(model) == version
        return model, await sample(stage, ids, 8)

    assert_sampled_from(*stage.run(scenario()))


def resume_trainer(stage: Stage) -> None:
    """Another sender at the address of the former one."""
    config = msgspec.structs.replace(stage.config.weights, bind=stage._sender.address)
    stage._sender.close()
    stage._sender = WeightSender(tensors=stage._tensors, rank=0, config=config, device=stage.device)
