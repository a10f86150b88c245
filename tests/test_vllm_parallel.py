"""A tensor-parallel generator: every worker is a rank of the weight group and takes its part of each tensor.

By hand, for it wants two cores or GPUs of its own: `python -m pytest tests/test_vllm_parallel.py -m vllm_parallel -s`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm_parallel, pytest.mark.slow]

from vllm_support import Stage, k3, peaked_model, prompts, sampling, score  # noqa: E402  (needs vLLM)

from asyncrl.types import Completion  # noqa: E402


def test_two_workers_receive_and_serve_what_the_trainer_sent(tmp_path: Path) -> None:
    stage = Stage(tmp_path, procs=2)
    model = peaked_model(11)

    async def scenario() -> list[Completion]:
        await stage.publish(peaked_model(10))
        await stage.publish(model)
        return await asyncio.gather(*(stage.engine.generate(p, sampling(64)) for p in prompts(8, 30)))

    try:
        done = stage.run(scenario())
    finally:
        stage.close()
    behaviour = np.concatenate([c.logprobs for c in done])
    current = np.concatenate([s.alone for s in score(model, done)])
    print(f"test=parallel k3={k3(behaviour, current):.3g} mean_abs_diff={np.abs(current - behaviour).mean():.3g}")
    assert stage.engine.num_weight_ranks == 2
    assert k3(behaviour, current) < 1e-3
    assert all(set(c.versions.tolist()) == {1} for c in done)
