"""From a file and a command line to a run: load, resolve, check, and read back in every process.

    config = load(path, overrides)     YAML or TOML plus dotted overrides -> Config
    run = resolve(config)              defaults filled in, algorithm and environment built -> Run
    check(run)                         what cannot work is refused, in one line with the remedy (checks.py)
    save(run); load_run(run.dir)       the hand-off to the other processes

Every complaint is a ValueError of one line that names the key; the command line turns it into exit code 2.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncrl import keys
from asyncrl.algorithm import Algorithm, as_algorithm
from asyncrl.checks import check
from asyncrl.config import Config, DatasetConfig
from asyncrl.data import dataset_of, with_dataset
from asyncrl.demo import TINY
from asyncrl.env import Env, has_demonstrations
from asyncrl.registry import ALGOS, ENVS, import_user_module

__all__ = [
    "Run",
    "check",
    "dump",
    "import_all",
    "load",
    "load_run",
    "num_references",
    "on_env",
    "resolve",
    "resume",
    "save",
]

_SHAPING = {"top_p", "top_k", "min_p"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A resolved configuration with its algorithm and environment built."""

    config: Config
    algo: Algorithm
    env: Env

    @property
    def dir(self) -> Path:
        """The run folder."""
        assert self.config.run_dir is not None, "resolve() sets it"
        return Path(self.config.run_dir)


def num_references(run: Run) -> int:
    """Reference processes of a run: none where the loss reads no reference, whatever is configured."""
    return run.config.services.ref_model.num_replicas if run.algo.needs().reference else 0


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """A file (or nothing) with dotted overrides on top -> Config. Overrides may be text; fields give the type."""
    tree = _named(_read(Path(path)) if path is not None else {})
    for key, value in (overrides or {}).items():
        _refuse_shaping(key)
        keys.put(tree, key, value)
    tree = _one_dataset(tree)
    model = tree.get("model", {})
    if not isinstance(model, Mapping) or model.get("path", "tiny") == "tiny":
        tree = keys.merge(keys.merge(TINY, _tiny_of_env(tree)), tree)
    return keys.convert(tree, Config)


def _one_dataset(tree: keys.Tree) -> keys.Tree:
    """`env.dataset.key`, as an environment's page names it, is `dataset.key`, which wins where both are written."""
    env = tree.get("env")
    if not isinstance(env, Mapping) or not isinstance(env.get("dataset"), Mapping):
        return tree
    import_all(tree.get("imports") or [])
    if keys.field_types(_env_class(str(env.get("name", "")))).get("dataset") is not DatasetConfig:
        return tree
    return keys.merge(
        {"dataset": env["dataset"]}, {**tree, "env": {key: value for key, value in env.items() if key != "dataset"}}
    )


def _tiny_of_env(tree: keys.Tree) -> keys.Tree:
    """What the environment wants of a run with the tiny model. Without demonstrations there is no warm-up to run."""
    import_all(tree.get("imports") or [])
    env = tree.get("env")
    cls = _env_class(str(env.get("name", ""))) if isinstance(env, Mapping) else Env  # convert() says what is wrong
    return keys.merge({} if has_demonstrations(cls) else {"training": {"warmup_sft_steps": 0}}, cls.tiny)


def resolve(config: Config) -> Run:
    """Fill in what depends on other keys, and build the algorithm and the environment. Idempotent."""
    import_all(config.imports)
    algo = _build(as_algorithm(ALGOS.get(str(config.algo["name"]))), config.algo, section="algo")
    env = _build(_env_class(str(config.env["name"])), {"seed": config.seed, **config.env}, section="env")
    env = with_dataset(env, config.dataset)
    replay, generation = config.replay, config.generation
    lag = replay.target_lag
    again = replay.reuse - -(-replay.reuse // max(1, config.training.batch_size))  # what reuse adds (replay/limiter.py)
    max_lag = replay.max_lag if replay.max_lag is not None else lag + again + (2 if lag else 0)
    capacity = replay.capacity_groups
    capacity = capacity if capacity is not None else (lag + 2) * config.training.batch_size
    groups = generation.max_groups
    groups = groups if groups is not None else max(1, generation.max_concurrency // max(1, algo.n_samples))
    warmup = config.training.warmup_sft_steps
    resolved = msgspec.structs.replace(
        config,
        run_dir=config.run_dir if config.run_dir is not None else str(_free_dir(Path("runs") / config.name)),
        algo={"name": config.algo["name"], **msgspec.to_builtins(algo)},
        env={"name": config.env["name"], **_written(env)},
        dataset=dataset_of(env) or config.dataset,
        replay=msgspec.structs.replace(replay, max_lag=max_lag, capacity_groups=capacity),
        generation=msgspec.structs.replace(generation, max_groups=groups),
        eval=msgspec.structs.replace(config.eval, temperature=_eval_temperature(config)),
        training=msgspec.structs.replace(config.training, warmup_sft_steps=warmup if warmup is not None else 0),
    )
    return Run(config=resolved, algo=algo, env=env)


def _eval_temperature(config: Config) -> float:
    """Raises ValueError for several greedy responses, which would be one and the same."""
    chosen, n = config.eval.temperature, config.eval.n
    if chosen == 0 and n > 1:
        raise ValueError(
            f"eval.temperature 0 gives {n} times the same response; set eval.n to 1 or raise the temperature"
        )
    return chosen if chosen is not None else float(n > 1)


def on_env(run: Run, env: Env, *, run_dir: Path) -> Run:
    """The same run on another environment of the same name (other fields), as a run folder of its own."""
    fields = _written(env)
    config = msgspec.structs.replace(
        run.config,
        run_dir=str(run_dir),
        env={"name": run.config.env["name"], **fields},
        dataset=dataset_of(env) or run.config.dataset,
    )
    return Run(config=config, algo=run.algo, env=env)


def save(run: Run) -> None:
    """Write config.yaml into the run folder, whole or not at all. One that was there and differs becomes
    config.000.yaml, config.001.yaml, ..."""
    run.dir.mkdir(parents=True, exist_ok=True)
    path, text = run.dir / "config.yaml", dump(run)
    if path.exists() and path.read_text() != text:  # a resume that changes something: what was is kept
        before = sorted(run.dir.glob("config.*.yaml"))
        (run.dir / f"config.{len(before):03}.yaml").write_text(path.read_text())
    temporary = run.dir / "config.yaml.part"
    temporary.write_text(text)
    os.replace(temporary, path)


def dump(run: Run) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(msgspec.to_builtins(run.config), sort_keys=False)


def load_run(run_dir: str | Path) -> Run:
    """Read back what `save` wrote: same classes, same fields, in any process."""
    path = Path(run_dir) / "config.yaml"
    if not path.exists():
        raise ValueError(f"{run_dir} is not a run folder: it has no config.yaml")
    config = keys.convert(_named(_read(path)), Config)
    return resolve(msgspec.structs.replace(config, run_dir=str(run_dir)))


def resume(target: str, overrides: Mapping[str, Any] | None = None) -> Run:
    """The run in folder `target` (`auto`: the newest under runs/), with overrides, to be continued."""
    run_dir = _newest_run() if target == "auto" else Path(target)
    path = run_dir / "config.yaml"
    if not path.exists():
        raise ValueError(f"--resume {target}: {run_dir} is not a run folder, it has no config.yaml")
    tree = _named(_read(path))
    before = keys.convert(tree, Config)
    for key, value in (overrides or {}).items():
        keys.put(tree, key, value)
    new_name = tree["env"]["name"]
    if new_name != before.env["name"]:
        raise ValueError(_kept(run_dir, "env.name", before.env["name"]))
    run = resolve(msgspec.structs.replace(keys.convert(tree, Config), run_dir=str(run_dir)))
    _refuse_changes(resolve(msgspec.structs.replace(before, run_dir=str(run_dir))), run)
    done = max((int(p.name[5:]) for p in run_dir.glob("checkpoints/step-*")), default=0)
    if (steps := run.config.training.steps) < done:
        raise ValueError(f"--resume {run_dir}: training.steps is {steps}, and {done} are trained already: give more")
    return run


def _refuse_changes(before: Run, after: Run) -> None:
    """Raise ValueError for the first change that what is buffered, or the position in the data, does not survive."""
    pairs: list[tuple[str, Any, Any]] = [
        ("seed", before.config.seed, after.config.seed),
        ("algo.n_samples", before.algo.n_samples, after.algo.n_samples),
    ]
    for section in ("env", "dataset", "model", "curriculum", "training.lora"):
        old, new = (_leaves(run, section) for run in (before, after))
        pairs += [(f"{section}.{key}", value, new.get(key)) for key, value in old.items()]
    for key, was, wanted in pairs:
        if was != wanted:
            raise ValueError(_kept(after.dir, key, was))


def _leaves(run: Run, section: str) -> dict[str, Any]:
    """What a section of the configuration holds; nothing for one that is none."""
    found: Any = run.config
    for part in section.split("."):
        found = getattr(found, part)
    return msgspec.to_builtins(found) or {}


def _kept(run_dir: Path, key: str, value: Any) -> str:
    return (
        f"--resume {run_dir} keeps {key} {value!r}: what is buffered and the position in the data depend on it; change "
        "it in a new run"
    )


def import_all(targets: Iterable[str]) -> None:
    """Import modules or .py files for their registrations."""
    for target in targets:
        import_user_module(target)


def _newest_run() -> Path:
    found = sorted(Path("runs").glob("*/config.yaml"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ValueError("--resume auto: there is no run under runs/")
    return found[-1].parent


class _Unique(yaml.SafeLoader):
    """YAML in which a key that appears twice is an error: one of the two would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} appears twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read(path: Path) -> keys.Tree:
    """A YAML or TOML file as a tree."""
    if not path.exists():
        raise ValueError(f"there is no configuration file {path}")
    try:
        text = path.read_text()
        tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _Unique)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if tree is not None and not isinstance(tree, dict):
        raise ValueError(f"{path} must be a mapping of sections, got {type(tree).__name__}")
    return tree or {}


def _named(tree: keys.Tree) -> keys.Tree:
    """`algo: dapo` means `algo: {name: dapo}`; so for env."""
    for section in ("algo", "env"):
        if isinstance(tree.get(section), str):
            tree[section] = {"name": tree[section]}
        value = tree.setdefault(section, {})
        if not isinstance(value, dict):
            raise ValueError(f"{section} must be a name or a mapping with a name, got {value!r}")
        value.setdefault("name", {"algo": "fade", "env": "sort_digits"}[section])
    return tree


def _env_class(name: str) -> type[Env]:
    found = ENVS.get(name)
    if not issubclass(found, Env):
        raise ValueError(f"environment {name!r} must subclass asyncrl.Env")
    return found


def _build(cls: type, values: Mapping[str, Any], *, section: str) -> Any:
    """The Struct of a section from its own keys; the name itself is the registry's."""
    own = {k: v for k, v in values.items() if k != "name"}
    return keys.convert(own, cls, section=section)


def _written(env: Env) -> keys.Tree:
    """The env section: its dataset has a section of its own."""
    fields: keys.Tree = msgspec.to_builtins(env)
    return fields if dataset_of(env) is None else {key: value for key, value in fields.items() if key != "dataset"}


def _free_dir(wanted: Path) -> Path:
    """`wanted`, or with -2, -3, ... when a run is already there: no run overwrites another."""
    number, path = 1, wanted
    while (path / "config.yaml").exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def _refuse_shaping(path: str) -> None:
    if path.replace("-", "_").rsplit(".", 1)[-1] in _SHAPING:
        raise ValueError(
            f"{path}: top-p, top-k and min-p change the support of the sampling distribution, which no loss here "
            "corrects; sample with algo.temperature alone"
        )
