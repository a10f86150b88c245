"""Defaults for the model that is built on the spot, so that `asyncrl train --algo dapo` is a run of a few minutes on
two CPU cores. `settings.load` puts them below everything the user wrote, and only when `model.path` is `tiny`.

Sizes were chosen by measurement (bench.md): real staleness, a reward that visibly rises, every kind of process.
"""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "training": {
        "steps": 130,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "schedule": "linear",
        "seq_len": 64,
        "tokens_per_micro_batch": 8192,
        "dtype": "float32",
        "warmup_sft_steps": 120,
    },
    "generation": {"engine": "local", "max_tokens": 12, "max_concurrency": 64, "dtype": "float32"},
    "weights": {"bucket_bytes": 1 << 20},
    "services": {"generator": {"num_replicas": 2}, "trainer": {"procs": 2}},
}
