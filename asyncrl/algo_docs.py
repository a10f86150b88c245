"""What `asyncrl algos` prints: a table of all algorithms, and a page for one, both from the code itself.

Called by `cli.py`. Formula and omissions are the module's docstring, keys and defaults the Struct's fields with the
docstrings under them. Never imports torch, so both are instant.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from functools import cache

import msgspec

from asyncrl.algorithm import Algorithm, as_algorithm
from asyncrl.losses import checks
from asyncrl.losses.advantages import ADVANTAGES
from asyncrl.losses.corrections import CORRECTIONS
from asyncrl.losses.objectives import OBJECTIVES
from asyncrl.registry import ALGOS

TRUST_REGIONS = {
    "reinforce": "none",
    "ppo_clip": "ratio of a token in [{lo:g}, {hi:g}]",
    "gspo": "ratio of a response in [{lo:g}, {hi:g}]",
    "cispo": "none: weight at most {weight_max:g}",
    "sapo": "smooth gate on the ratio",
    "dppo_tv": "probability moves at most {divergence:g}",
    "m2po": "second moment of log ratio at most {moment_budget:g}",
    "topr": "negatives taper with their ratio",
    "vespo": "smooth kernel on a response's ratio",
    "delightful": "gate on advantage times surprise",
}
"""What bounds the step, by objective; filled in with the preset's own bounds."""

OWN = "its own"
"""A stage that the class writes itself."""


def table() -> list[dict[str, str]]:
    """One row per algorithm: name, objective, advantages, aggregation, trust region, paper."""
    return [_row(name, as_algorithm(cls)) for name, cls in ALGOS.all().items()]


def page(name: str) -> str:
    """Formula, what is left out, stages, and every key with its default. Raises ValueError for an unknown name."""
    cls = as_algorithm(ALGOS.get(name))
    algo = cls()
    parts = [f"{name}: {inspect.getdoc(cls) or ''}", _formula(cls), "Stages", _stages(algo), "Keys", _keys(cls, algo)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _row(name: str, cls: type[Algorithm]) -> dict[str, str]:
    algo = cls()
    own = checks.writes_own_loss(algo) or checks.writes_own_objective(algo)
    return {
        "name": name,
        "objective": OWN if own else algo.objective,
        "advantages": OWN if checks.writes_own_advantages(algo) else algo.advantage,
        "aggregation": algo.aggregation,
        "trust region": OWN if own else _trust_region(algo),
        "paper": _paper(cls),
    }


def _trust_region(algo: Algorithm) -> str:
    bounds = checks.used_keys(algo)
    bounds |= {"lo": 1 - bounds.get("clip_low", 0), "hi": 1 + bounds.get("clip_high", 0)}
    text = TRUST_REGIONS[algo.objective].format(**bounds)
    if algo.objective == "reinforce" and "correction_cap" in bounds:
        text = f"none: weight at most {bounds['correction_cap']:g}"
    return text + (f", anchor {algo.anchor}" if algo.anchor != "behaviour" else "")


def _module_doc(cls: type) -> str:
    return inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")


def _paper(cls: type) -> str:
    found = re.search(r"\d{4}\.\d{5}", _module_doc(cls))
    return f"arXiv:{found.group()}" if found else "-"


def _formula(cls: type[Algorithm]) -> str:
    return _module_doc(cls) if cls.__module__ != Algorithm.__module__ else ""


def _stages(algo: Algorithm) -> str:
    lines = [
        ("advantage", OWN, type(algo).advantages.__doc__)
        if checks.writes_own_advantages(algo)
        else ("advantage", algo.advantage, inspect.getdoc(ADVANTAGES[algo.advantage]))
    ]
    if checks.writes_own_loss(algo):
        lines.append(("loss", OWN, type(algo).loss.__doc__))
        return "\n".join(_item(f"{stage} = {name}", text or "") for stage, name, text in lines)
    if checks.writes_own_objective(algo):
        lines.append(("objective", OWN, type(algo).surrogate.__doc__))
    else:
        lines.append(("objective", algo.objective, inspect.getdoc(OBJECTIVES[algo.objective])))
    if algo.correction != "none":
        lines.append(("correction", algo.correction, inspect.getdoc(CORRECTIONS[algo.correction])))
    return "\n".join(_item(f"{stage} = {name}", text or "") for stage, name, text in lines)


def _keys(cls: type[Algorithm], algo: Algorithm) -> str:
    docs, used = field_docs(cls), checks.used_keys(algo)
    stages, silent = set(checks.all_stage_keys()), set(checks.without_effect(algo))
    lines = []
    for field in msgspec.structs.fields(cls):
        if field.name in silent or (field.name in stages and field.name not in used):
            continue  # belongs to a stage that this preset does not choose
        value = used.get(field.name, getattr(algo, field.name))
        lines.append(_item(f"--algo.{field.name} {value}", docs.get(field.name, "")))
    return "\n".join(lines)


def _item(head: str, text: str) -> str:
    body = textwrap.fill(" ".join(text.split()), width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {head}\n{body}" if text else f"  {head}"


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a Struct and of the classes it derives from."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Algorithm):
            docs |= _own_field_docs(base)
    return docs


@cache
def _own_field_docs(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source: an adapted module, or a class made in a session
        return {}
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: doc.value.value
        for field, doc in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
