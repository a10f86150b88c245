"""The command `asyncrl`. Turns words into calls and errors into one line and an exit code; does no work itself.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted. Everything heavy is imported by the command that needs it,
so `asyncrl --help` imports neither torch nor vLLM nor pandas.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

from asyncrl import __version__
from asyncrl import help as pages
from asyncrl.arguments import ALIASES, OPTIONS, Arguments, parse
from asyncrl.keys import nearest

ROLES = ("replay", "generator", "reference", "trainer", "sft")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if os.getcwd() not in sys.path:  # a user's module beside the command: the processes of a run find it there too
        sys.path.append(os.getcwd())
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if "version" in args.flags:
            print(f"asyncrl {__version__}")
            return 0
        if not args.command:
            print(pages.general(), end="")
            return 0 if args.flags or not (argv or sys.argv[1:]) else 2
        if args.command not in COMMANDS:
            raise ValueError(f"there is no command {args.command!r}{nearest(args.command, list(COMMANDS))}")
        if "help" in args.flags and args.command in pages.SHORT:
            print(pages.SHORT[args.command], end="")
            return 0
        _refuse_unheard(args)
        return COMMANDS[args.command](args)
    except ValueError as error:
        print(f"asyncrl: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `asyncrl algos | head`
        sys.stderr.close()
        return 0


def train(args: Arguments) -> int:
    """A run from its first process to its last; or one process of it (--role)."""
    if "role" in args.options:
        _role(args)
    return _run(args, ranks="trainer")


def sft(args: Arguments) -> int:
    """Supervised training on the environment's demonstrations, without a replay server or generators."""
    return _run(args, ranks="sft")


def _run(args: Arguments, *, ranks: Literal["trainer", "sft"]) -> int:
    if "help" in args.flags:
        return _help(args.command, args)
    from asyncrl.env import has_demonstrations
    from asyncrl.settings import check, dump, load, resolve, resume

    _no_names(args)
    again = args.options.get("resume")
    run = resume(again, args.overrides) if again else resolve(load(args.options.get("config"), args.overrides))
    if again:
        _refuse_supervised(run.dir, ranks)
    if ranks == "sft" and not has_demonstrations(run.env):
        raise ValueError(
            f"asyncrl sft trains on an environment's demonstrations, and {run.config.env['name']!r} has none: give its "
            "class demonstrations(), or choose another --env (`dataset`: your own data)"
        )
    check(run, supervised=ranks == "sft")
    if "dry_run" in args.flags:
        print(dump(run), end="")
        return 0
    if again is None and (run.dir / "config.yaml").exists():
        raise ValueError(
            f"{run.dir} already holds a run: --resume {run.dir} continues it, --run-dir names another folder"
        )
    from asyncrl.launch import launch

    return launch(run, ranks=ranks)


def _refuse_supervised(run_dir: Path, ranks: Literal["trainer", "sft"]) -> None:
    """A resume on either side of supervised training would begin anew, over the figures and the model there are."""
    from asyncrl.metrics import read_rows

    if ranks == "sft":
        raise ValueError(
            f"asyncrl sft keeps no checkpoints, so --resume {run_dir} has none to continue from: start it again in a "
            "new folder, with --model FOLDER on top of a model"
        )
    if any("sft/loss" in row and row["step"] for row in read_rows(run_dir)):
        raise ValueError(
            f"--resume {run_dir}: that was supervised training; start from its model in a new run: "
            f"--model {run_dir / 'model'}"
        )


def algos(args: Arguments) -> int:
    """A line for each algorithm, or the page of one."""
    from asyncrl import algo_docs
    from asyncrl.settings import import_all

    import_all(args.overrides.pop("imports", []))
    _no_overrides(args)
    if args.names:
        print("\n\n".join(algo_docs.page(name) for name in args.names), end="")
    else:
        _table(algo_docs.table())
    return 0


def envs(args: Arguments) -> int:
    """A line for each environment, the page of one, or `check NAME`."""
    from asyncrl.env_docs import page, table
    from asyncrl.settings import import_all

    imports = args.overrides.pop("imports", [])
    if args.names[:1] == ["check"] and len(args.names) == 2:
        return _check_environment(args.names[1], args.overrides, imports)
    if args.names[:1] == ["check"]:
        raise ValueError("asyncrl envs check takes one environment, as in `asyncrl envs check sort_digits`")
    import_all(imports)
    _no_overrides(args)
    if args.names:
        print("\n\n".join(page(name) for name in args.names), end="")
    else:
        _table(table())
    return 0


def _check_environment(target: str, overrides: dict[str, Any], imports: list[str]) -> int:
    from asyncrl.env_trial import Trial, try_out

    limit_s = _seconds("timeout_s", overrides.pop("timeout_s", None))
    stray = [key for key in overrides if not key.startswith(("env.", "dataset."))]
    if stray:
        raise ValueError(f"asyncrl envs check takes --env.key, --dataset.key and --timeout-s options, got --{stray[0]}")
    trial = Trial(target=target, overrides=overrides, imports=imports, limit_s=limit_s)
    return 0 if try_out(trial) else 1


def _seconds(option: str, given: Any) -> float:
    """A bound as it stands on the command line."""
    from asyncrl.env_check import LIMIT_S

    try:
        seconds = LIMIT_S if given is None else float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--{option.replace('_', '-')} must be a number of seconds above 0, got {given!r}")
    return seconds


def evaluate(args: Arguments) -> int:
    """avg@n and pass@k of a model, or of what a run has trained."""
    if "help" in args.flags:
        return _help("eval", args)
    from asyncrl.evaluate import evaluate_run, of_trained
    from asyncrl.settings import load, resolve

    if len(args.names) > 1:
        raise ValueError("asyncrl eval takes one run folder, or --model PATH")
    if args.names:
        _refuse_for_run(args)
        return evaluate_run(of_trained(args.names[0], args.overrides))
    config = load(args.options.get("config"), {"name": "eval", **args.overrides})
    if config.model.path == "tiny" and "model.path" not in args.overrides:
        raise ValueError(
            "asyncrl eval needs what it evaluates: a run folder, as in `asyncrl eval runs/demo`, or --model PATH "
            "(--model tiny: the demo's model, untrained)"
        )
    return evaluate_run(resolve(config))


def _refuse_for_run(args: Arguments) -> None:
    """What `asyncrl eval RUN` takes from the run itself."""
    given = [*args.options, *(key for key in ("model.path", "run_dir", "name") if key in args.overrides)]
    if given:
        raise ValueError(
            f"asyncrl eval RUN evaluates RUN/model with the run's configuration and writes to RUN/eval: "
            f"{_option(given[0])} has no effect; leave it out, or leave RUN out and name a --model"
        )


def plot(args: Arguments) -> int:
    """PNGs of a run."""
    from asyncrl.plot import draw

    for path in draw(_run_folder(args)):
        print(path)
    return 0


def status(args: Arguments) -> int:
    """Who waits for whom."""
    from asyncrl.status import describe

    print("\n".join(describe(_run_folder(args))))
    return 0


def keys(args: Arguments) -> int:
    """Make CURVE keys for runs on several hosts."""
    from asyncrl.replay.keys import add_client, new_keys

    _no_overrides(args)
    match args.names:
        case ["new", folder]:
            new_keys(Path(folder))
            print(f"made {folder}: set replay.keys to it; `asyncrl keys add {folder} OTHER` makes one for another host")
        case ["add", folder, other]:
            add_client(Path(folder), Path(other))
            print(f"made {other}: copy it to the other host, and set replay.keys to it there")
        case _:
            raise ValueError("usage: asyncrl keys new FOLDER, or asyncrl keys add FOLDER OTHER")
    return 0


def doctor(args: Arguments) -> int:
    """What this machine offers and lacks."""
    from asyncrl.doctor import report

    _no_names(args)
    _no_overrides(args)
    return report()


COMMANDS: dict[str, Callable[[Arguments], int]] = {
    "train": train,
    "sft": sft,
    "algos": algos,
    "envs": envs,
    "eval": evaluate,
    "plot": plot,
    "status": status,
    "keys": keys,
    "doctor": doctor,
}


HEARD = {"train": {*OPTIONS, "dry_run"}, "sft": {"config", "resume", "dry_run"}, "eval": {"config"}}
"""Options and flags that are no keys of the configuration, by the commands that look at them."""


def _refuse_unheard(args: Arguments) -> None:
    for key in (*args.options, *sorted(args.flags - {"help"})):
        if key not in HEARD.get(args.command, ()):
            raise ValueError(f"asyncrl {args.command} has no option {_option(key)}")


def _option(key: str) -> str:
    """A key as it is written on the command line."""
    short = {path: alias for alias, path in ALIASES.items()}
    return f"--{short.get(key, key).replace('_', '-')}"


def _help(command: str, args: Arguments) -> int:
    from asyncrl.algorithm import as_algorithm
    from asyncrl.registry import ALGOS, ENVS
    from asyncrl.settings import import_all

    import_all(args.overrides.get("imports", []))
    algo = as_algorithm(ALGOS.get(str(args.overrides.get("algo.name", "fade"))))
    env = ENVS.get(str(args.overrides.get("env.name", "sort_digits")))
    print(pages.command(command, algo=algo, env=env), end="")
    return 0


def _role(args: Arguments) -> NoReturn:
    role = args.options["role"]
    if role not in ROLES:
        raise ValueError(f"--role {role}: known roles are {', '.join(ROLES)}")
    run_dir = args.overrides.get("run_dir")
    if not isinstance(run_dir, str):
        raise ValueError("--role needs the --run-dir of the run it belongs to")
    if not Path(run_dir, "config.yaml").exists():  # or a mistyped folder would be made, for the error file
        raise ValueError(
            f"--run-dir {run_dir}: it holds no config.yaml here. Every host needs the run folder, or a copy of its "
            "config.yaml"
        )
    index = args.options.get("index", "0")
    if not index.isdecimal():
        raise ValueError(f"--index must be a whole number, got {index!r}")
    from asyncrl.roles import run_role

    run_role(role, run_dir=run_dir, index=int(index), address=args.options.get("address"))


def _run_folder(args: Arguments) -> Path:
    if len(args.names) != 1:
        raise ValueError(f"asyncrl {args.command} needs one run folder, as in `asyncrl {args.command} runs/demo`")
    _no_overrides(args)
    return Path(args.names[0])


def _no_names(args: Arguments) -> None:
    if args.names:
        raise ValueError(f"unexpected argument {args.names[0]!r}: options start with --")


def _no_overrides(args: Arguments) -> None:
    if args.overrides:
        raise ValueError(f"asyncrl {args.command} has no option {_option(next(iter(args.overrides)))}")


def _table(rows: list[dict[str, str]]) -> None:
    """Columns as wide as their widest cell."""
    if not rows:
        return
    heads = list(rows[0])
    widths = {h: max(len(h), *(len(row[h]) for row in rows)) for h in heads}
    for row in [{h: h for h in heads}, *rows]:
        print("  ".join(row[h].ljust(widths[h]) for h in heads).rstrip())
