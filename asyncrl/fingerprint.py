"""Whether two processes belong to the same run: a digest of each section that all of them must agree on.

Every process of a run tells the replay server its own (`messages.Hello`), and the server refuses one of another run: a
wrong address, or that of a former server whose port another one has taken, would otherwise mix two runs in silence.
What may differ from host to host is left out: folders, addresses, keys, devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec

from asyncrl.config import Config


def fingerprint(config: Config) -> dict[str, str]:
    """Section -> digest, of a resolved configuration."""
    generation = config.generation
    sections: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "algo": config.algo,
        "env": config.env,
        "dataset": _but(config.dataset, "path"),
        "curriculum": config.curriculum,
        "model": _but(config.model, "path", "attention"),
        "training": config.training,
        "generation": {"max_tokens": generation.max_tokens, "thinking": generation.thinking},
    }
    return {name: _digest(section) for name, section in sections.items()}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Sections that both have and do not agree on."""
    return [name for name in ours if name in theirs and ours[name] != theirs[name]]


def _but(section: msgspec.Struct, *left_out: str) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(section).items() if key not in left_out}


def _digest(section: Any) -> str:
    return sha256(msgspec.json.encode(section, order="sorted")).hexdigest()[:16]
