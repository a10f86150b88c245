"""Libraries that only some environments need: imported when used, and named with their `pip install` when absent."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import `module`. Raises ValueError that says what to install when it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise ValueError(f"{wanted_by}: {module} is installed and cannot be imported: {error}") from error
        raise ValueError(f"{wanted_by} needs {module}: pip install 'asyncrl[{extra}]'") from error
