"""`--help`: every key of the configuration with its type, default and the docstring under its field.

Built from the Structs themselves, those of the chosen algorithm and environment included, so it cannot differ from what
is accepted. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.demo import TINY
from asyncrl.keys import field_types, is_struct, type_text

WIDTH = 110

GENERAL = """asyncrl: asynchronous off-policy reinforcement learning for language models

  asyncrl train --algo dapo                 post-train a model: replay server, generators and trainer, supervised
  asyncrl train --help                      every key, with those of the chosen --algo and --env
  asyncrl sft --model PATH                  supervised training on the environment's demonstrations
  asyncrl algos [NAME]                      algorithms, or one of them with its formula and keys
  asyncrl envs [NAME | check NAME]          environments, or one of them; check plays its own answers against it
  asyncrl eval RUN                          avg@n and pass@k of what a run trained; or --model PATH --env NAME --n 8
  asyncrl plot RUN                          draw reward, staleness, ledger, idle time and a timeline as PNGs
  asyncrl status RUN                        who waits for whom, right now
  asyncrl keys new FOLDER                   CURVE keys, for runs on several hosts
  asyncrl doctor                            what this machine offers and lacks

A run folder (runs/<name> by default) holds config.yaml, metrics.jsonl, samples.jsonl, logs/, checkpoints/ and model/.
"""

SHORT = {
    "algos": """usage: asyncrl algos [NAME ...] [--import MODULE]

A line for each algorithm, or the page of one: its formula, its keys with defaults, what it leaves out.
""",
    "envs": """usage: asyncrl envs [NAME ... | check NAME] [--import MODULE] [--env.key value ...]

A line for each environment, the page of one, or a check of one: prompts, masks, rewards and timings, with a scripted
model.
""",
    "plot": """usage: asyncrl plot RUN

Draws RUN/plots: reward, staleness, ledger, idle time, and a timeline of who was doing what.
""",
    "status": """usage: asyncrl status RUN

Who waits for whom, the ledger, and why groups were dropped; from any terminal, while the run goes on or after it.
""",
    "keys": """usage: asyncrl keys new FOLDER
       asyncrl keys add FOLDER OTHER

CURVE keys for runs on several hosts: set replay.keys to FOLDER; OTHER is a key for another host.
""",
    "doctor": """usage: asyncrl doctor

What this machine offers and lacks: versions, GPUs, engines, optional libraries.
""",
}
"""The pages of commands that take no configuration."""

EVAL = """usage: asyncrl eval RUN [--section.key value ...]
       asyncrl eval --model PATH --env NAME [--n 8] [--section.key value ...]

avg@n and pass@k with 95 % intervals, of what RUN has trained or of any model; responses are written to a file. What is
measured and how: the keys of `eval`; sampling: those of `generation`; what is asked: those of `env` and `dataset`.
"""

OPTIONS = """usage: asyncrl {command} [options] [--section.key value ...]

  --config FILE          YAML or TOML; what the command line says wins
  --algo NAME            name, import path (my_pkg.my_algo:MyAlgo) or entry point; `asyncrl algos` lists them
  --env NAME             likewise; `asyncrl envs` lists them
  --model PATH           a local Hugging Face folder, a hub name, or `tiny`
  --import MODULE        module or .py file to import in every process, for its registrations; may be repeated
  --resume RUN | auto    continue the run in that folder, or the newest one
  --dry-run              print the resolved configuration and start nothing
"""

ROLE = """\
  --role NAME --index I  be one process of the run in --run-dir (replay, generator, reference, trainer), for clusters
"""


def general() -> str:
    return GENERAL


def command(name: str, *, algo: type | None, env: type | None) -> str:
    """The page of train, sft or eval."""
    parts = [EVAL if name == "eval" else OPTIONS.format(command=name) + (ROLE if name == "train" else "")]
    top, sections = [], []
    for key, kind in field_types(Config).items():
        if is_struct(kind):
            sections.append(_section(kind, key))
        elif key not in ("algo", "env"):
            top.append(_entry(Config, key, key))
    parts.append("\n".join(top))
    if algo is not None:
        parts.append(_section(algo, "algo"))
    if env is not None:
        parts.append(_section(env, "env"))
    return "\n\n".join(parts + sections) + "\n"


def _section(struct: type[msgspec.Struct], prefix: str) -> str:
    first_line = (inspect.getdoc(struct) or "").partition("\n")[0]
    return "\n".join([f"{prefix}: {first_line}", *entries(struct, prefix)])


def entries(struct: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for name, kind in field_types(struct).items():
        if is_struct(kind):
            yield from entries(kind, f"{prefix}.{name}")
        else:
            yield _entry(struct, name, f"{prefix}.{name}")


def _entry(struct: type[msgspec.Struct], name: str, path: str) -> str:
    default = _default(struct, name)
    demo = _demo_default(path)
    shown = f"default {_text(default)}" + (f", tiny model {_text(demo)}" if demo is not None else "")
    head = f"  --{path.replace('_', '-')} <{type_text(field_types(struct)[name])}>  ({shown})"
    return (
        head
        + "\n"
        + textwrap.fill(
            " ".join(field_docs(struct).get(name, "").split()), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    )


def _default(struct: type[msgspec.Struct], name: str) -> Any:
    field = next(f for f in msgspec.structs.fields(struct) if f.name == name)
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return "required" if field.default is msgspec.NODEFAULT else field.default


def _demo_default(path: str) -> Any:
    tree: Any = TINY
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(v) for v in value) or "none"
    return "none" if value is None or value == {} else f"{value}"


def field_docs(struct: type) -> dict[str, str]:
    """The docstring under each field of a Struct and of the classes it derives from."""
    docs: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if is_struct(base) and base is not msgspec.Struct:
            docs |= _own_docs(base)
    return docs


@cache
def _own_docs(struct: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source: an adapted class, or one made in a session
        return {}
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return {
        field.target.id: doc.value.value
        for field, doc in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
