"""What `asyncrl envs` prints: a table, and a page for one.

Called by `cli.py`. Summaries and keys are the code's own docstrings and fields. `asyncrl envs check` is env_check.py.
"""

from __future__ import annotations

import inspect
import sys

from asyncrl import help as pages
from asyncrl.registry import ENVS


def table() -> list[dict[str, str]]:
    """One row per environment: name and summary."""
    return [{"name": name, "what it is": _summary(cls)} for name, cls in ENVS.all().items()]


def page(name: str) -> str:
    """What it is, and every key with its default. Raises ValueError for an unknown name."""
    cls = ENVS.get(name)
    module = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    return "\n\n".join([f"{name}: {_summary(cls)}", module, "\n".join(["Keys", *pages.entries(cls, "env")])]) + "\n"


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
