"""A command line as data: a command, its options, and dotted overrides. Pure; `cli.py` calls it.

    train --algo dapo --replay.max-lag 7 --model.path=a=b --dry-run

Dashes and underscores are the same, `--key value` and `--key=value` too. An override with several values is a list, one
without a value is true. Whether a key exists, and of what type it is, `settings.load` decides, so that a key on the
command line is refused exactly like one in a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALIASES = {"algo": "algo.name", "env": "env.name", "model": "model.path", "n": "eval.n"}
"""Short options that set a key. Top-level keys (--seed, --name, --run-dir) need no alias."""

OPTIONS = {"config", "resume", "role", "index", "address"}
"""Options with a value that are not keys of the configuration."""

FLAGS = {"help", "dry_run", "version"}
"""Options without a value."""


@dataclass(slots=True, kw_only=True)
class Arguments:
    """What was asked for."""

    command: str = ""
    names: list[str] = field(default_factory=list)
    """Positional arguments."""
    options: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    overrides: dict[str, Any] = field(default_factory=dict)
    """Dotted path -> text, or a list of texts."""


def parse(argv: list[str]) -> Arguments:
    """Raises ValueError for an option that lacks its value."""
    args, rest = Arguments(), list(argv)
    if rest and not rest[0].startswith("-"):
        args.command = rest.pop(0)
    while rest:
        word = rest.pop(0)
        if word == "-h":
            args.flags.add("help")
        elif word.startswith("--"):
            _option(args, word[2:], rest)
        else:
            args.names.append(word)
    return args


def _option(args: Arguments, word: str, rest: list[str]) -> None:
    key, equals, value = word.partition("=")
    key = key.replace("-", "_")
    if key in FLAGS:
        args.flags.add(key)
        return
    values = [value] if equals else _values(rest, most=None if key not in OPTIONS | {"import"} else 1)
    if key == "import":
        args.overrides.setdefault("imports", []).extend(_needed(key, values))
    elif key in OPTIONS:
        args.options[key] = _needed(key, values)[0]
    else:
        path = ALIASES.get(key, key)
        args.overrides[path] = values[0] if len(values) == 1 else values or "true"


def _values(rest: list[str], *, most: int | None) -> list[str]:
    values: list[str] = []
    while rest and rest[0] != "-h" and not rest[0].startswith("--") and (most is None or len(values) < most):
        values.append(rest.pop(0))
    return values


def _needed(key: str, values: list[str]) -> list[str]:
    if not values:
        raise ValueError(f"--{key.replace('_', '-')} needs a value")
    return values
