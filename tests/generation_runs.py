"""Run folders for the tests of the reward pool, the rollout loop and the generator process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import replay_helpers

from asyncrl.settings import Run, load, resolve, save

ENVIRONMENT = str(Path(__file__).parent / "generation_env.py")


def make_run(folder: Path, *kinds: str, **overrides: Any) -> Run:
    """A saved run of the environment of moods on the tiny model; overrides have `__` for the dot."""
    tree = {
        "imports": [ENVIRONMENT],
        "env.name": "moods",
        "env.kinds": list(kinds),
        "algo.n_samples": 2,
        "algo.dynamic_sampling": False,
        "training.batch_size": 2,
        "training.warmup_sft_steps": 0,
        "generation.max_tokens": 8,
        "run_dir": str(folder),
    }
    run = resolve(load(None, tree | {key.replace("__", "."): value for key, value in overrides.items()}))
    save(run)
    return run


@contextmanager
def serving(run: Run) -> Iterator[str]:
    """The run's replay server in a thread; yields its address."""
    with replay_helpers.serving(run) as server:
        yield server.address
