"""Configuration trees: nested dicts of raw values, addressed by dotted paths, checked and typed against the Structs.

`settings.py` and `cli.py` call this. Pure: no files, no registry, no command line. What it gives: unknown keys are
named with their path and the nearest known key, and text from a command line becomes the type its field declares.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

Tree = dict[str, Any]
"""Nested dicts; leaves are YAML values, or text that a command line gave."""

_NONE = {"none", "null"}

ELSEWHERE = {
    "lr": "training.learning_rate",
    "train_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "mini_batch_size": "training.minibatches",
    "ppo_mini_batch_size": "training.minibatches",
    "grad_clip": "training.max_grad_norm",
    "bf16": "training.dtype",
    "lora_r": "training.lora.rank",
    "lora_rank": "training.lora.rank",
    "lora_alpha": "training.lora.alpha",
    "num_train_epochs": "dataset.epochs",
    "total_epochs": "dataset.epochs",
    "num_generations": "algo.n_samples",
    "group_size": "algo.n_samples",
    "temperature": "algo.temperature",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "clip_ratio_low": "algo.clip_low",
    "clip_ratio_high": "algo.clip_high",
    "kl_coef": "algo.beta",
    "kl_loss_coef": "algo.beta",
    "max_completion_length": "generation.max_tokens",
    "max_new_tokens": "generation.max_tokens",
    "response_length": "generation.max_tokens",
    "tensor_parallel_size": "services.generator.procs",
    "tensor_model_parallel_size": "services.generator.procs",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "report_to": "metrics.trackers",
    "output_dir": "run_dir",
    "reward_funcs": "env.reward",
}
"""What other libraries call a key -> the key, for those whose nearest neighbour here would be a wrong one or none."""


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Name -> declared type, in order of declaration."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def paths(struct: type, prefix: str = "") -> Iterator[str]:
    """Every leaf key of a Struct as a dotted path."""
    for name, kind in field_types(struct).items():
        if is_struct(kind):
            yield from paths(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def put(tree: Tree, path: str, value: Any) -> None:
    """Set `a.b.c`, making sections on the way; dashes are underscores. Raises ValueError at a value in the way."""
    *sections, last = path.replace("-", "_").split(".")
    for depth, section in enumerate(sections):
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{path}: {'.'.join(sections[: depth + 1])} is {tree!r}, not a section")
    tree[last] = value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """A new tree: `above` wins, sections are merged."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(out[key], value) if both else value
    return out


def nearest(path: str, known: list[str]) -> str:
    """`; did you mean 'x'?` for the closest of `known`, by whole path or by last part; empty when nothing is close."""
    whole = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    if not whole:
        by_last = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
        last = difflib.get_close_matches(path.rsplit(".", 1)[-1], list(by_last), n=1)
        whole = [by_last[k] for k in last]
    return f"; did you mean {whole[0]!r}?" if whole else ""


def check_known(tree: Mapping[str, Any], struct: type, *, prefix: str = "", known: list[str] | None = None) -> None:
    """Raise ValueError for the first key, at any depth, that the Struct does not have."""
    known = known if known is not None else [prefix + p for p in paths(struct)]
    fields = field_types(struct)
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in fields:
            if key in ELSEWHERE:
                raise ValueError(f"unknown key {path!r}; here it is {ELSEWHERE[key]!r}")
            sections = [f"{prefix}{name}" for name, kind in fields.items() if is_struct(kind)]
            near = difflib.get_close_matches(path, sections, n=1, cutoff=0.8)  # a section has no leaf of its name
            raise ValueError(f"unknown key {path!r}{nearest(path, near or known)}")
        if is_struct(fields[key]):
            if not isinstance(value, Mapping):
                raise ValueError(f"{path} is a section, got {value!r}")
            check_known(value, fields[key], prefix=f"{path}.", known=known)


def typed(value: Any, kind: Any) -> Any:
    """Text -> something that msgspec's lax mode converts to `kind`; sections recursively; other values unchanged."""
    if is_struct(kind) and isinstance(value, Mapping):
        fields = field_types(kind)
        return {k: typed(v, fields[k]) for k, v in value.items()}
    if not isinstance(value, str):
        return value
    options = _options(kind)
    if type(None) in options and value.lower() in _NONE:
        return None
    if any(o is Any or get_origin(o) is dict or o is dict for o in options):
        return scalar(value)
    if any(get_origin(o) in (list, tuple) for o in options):
        return _items(value)
    return value


def scalar(text: str) -> Any:
    """Text with no declared type: JSON where it is JSON (numbers, true, lists, objects), otherwise the text."""
    if text.lower() in _NONE:
        return None
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    with contextlib.suppress(ValueError):
        return json.loads(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def convert(tree: Mapping[str, Any], struct: type, *, section: str = "") -> Any:
    """Tree -> Struct. Raises ValueError in one line that starts with the key's path."""
    check_known(tree, struct, prefix=f"{section}." if section else "")
    try:
        return msgspec.convert(typed(tree, struct), struct, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        if not what.startswith(("Expected", "Invalid enum")):  # a Struct's own __post_init__ says it best
            raise ValueError(what) from None
        where = where.rstrip("`").lstrip(".")
        value, kind = _at(tree, struct, where)
        wanted = what.partition(",")[0].removeprefix("Expected ").replace("`", "")
        wanted = f"one of {type_text(kind)}" if what.startswith("Invalid enum") else wanted
        wanted = "several values (--key a b, in a file [a, b])" if wanted == "array" else wanted
        raise ValueError(f"{'.'.join(p for p in (section, where) if p)}: expected {wanted}, got {value!r}") from None


def type_text(kind: Any) -> str:
    """A type as a reader of `--help` wants it: `int`, `float or none`, `keep | recompute | drain`."""
    texts = []
    for option in _options(kind):
        if option is type(None):
            texts.append("none")
        elif get_origin(option) is Literal:
            texts.append(" | ".join(str(a) for a in get_args(option)))
        elif get_origin(option) in (list, tuple):
            texts.append(f"list of {type_text(get_args(option)[0])}")
        else:
            texts.append("mapping" if get_origin(option) is dict else getattr(option, "__name__", str(option)))
    return " or ".join(texts)


def _options(kind: Any) -> list[Any]:
    """The members of a union, constraints stripped."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _options(get_args(kind)[0])
    if origin in (Union, types.UnionType):
        return [o for member in get_args(kind) for o in _options(member)]
    return [kind]


def _items(text: str) -> Any:
    if text.lstrip().startswith("["):
        return scalar(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _at(tree: Any, kind: Any, where: str) -> tuple[Any, Any]:
    """The value at a dotted path of a tree, and its declared type."""
    for part in where.split("[")[0].split("."):
        if not (isinstance(tree, Mapping) and is_struct(kind) and part in tree):
            break
        tree, kind = tree[part], field_types(kind)[part]
    return tree, kind
