"""Names -> classes, for algorithms and environments. Three doors: a decorator, an import path, an entry point.

    @register_env("sorting")            in a module named with --import, or in `envs/`
    --env my_pkg.my_env:MyEnv           an import path, or a file: my_env.py:MyEnv
    [project.entry-points."asyncrl.envs"] sorting = "my_pkg.my_env:MyEnv"

A name may carry a parameter, `reasoning_gym:chain_sum`: the class called `reasoning_gym` makes the class for it in its
classmethod `parametrised`. Names with commas are mixtures, `countdown:0.7,arithmetic:0.3`.

Files in `envs/` and `algos/` register on import; they are imported one by one as names are asked for, and all of them
only to list what there is. An unknown name is a ValueError that suggests the nearest one.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


class Registry:
    """One kind of named class. `package` holds the built-in files, `group` is the entry-point group."""

    def __init__(self, kind: str, package: str, group: str, *, mixture: str | None = None) -> None:
        self.kind, self.package, self.group, self.mixture = kind, package, group, mixture
        self._classes: dict[str, type] = {}
        self._made: dict[str, type] = {}
        self._broken: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the class known under `name`. A second, different class under one name is an error."""

        def add(cls: T) -> T:
            known = self._classes.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"two {self.kind}s are called {name!r}: {known.__module__} and {cls.__module__}")
            self._classes[name] = cls
            return cls

        return add

    def get(self, name: str) -> type:
        """The class called `name`: registered, built in, an entry point, an import path, or one with a parameter."""
        if self.mixture is not None and "," in name:
            return self._parametrised(self.mixture, name, name)
        base, colon, parameter = name.partition(":")
        if colon and ("." in base or "/" in base):
            return self._from_path(name)
        if self._find(name):
            return self._classes[name]
        if colon and self._find(base):
            return self._parametrised(base, parameter, name)
        if colon and _importable(base):
            return self._from_path(name)
        if base in self._broken:
            raise ValueError(f"{self.kind} {base!r} cannot be imported from {self._broken[base]}")
        raise ValueError(self._unknown(base))

    def _find(self, name: str) -> bool:
        """Look for a registered name, loading what might register it."""
        for load in (lambda: None, lambda: self._load_builtin(name), self._load_entry_points):
            load()
            if name in self._classes:
                return True
        return False

    def _parametrised(self, base: str, parameter: str, name: str) -> type:
        """The class that `base` makes for `parameter`: one and the same each time, so that types can be compared."""
        if name not in self._made:
            make = getattr(self.get(base), "parametrised", None)
            if make is None:
                raise ValueError(f"{self.kind} {base!r} takes no parameter, got {name!r}")
            self._made[name] = make(parameter)
        return self._made[name]

    def all(self) -> dict[str, type]:
        """Every class there is, by name; imports all built-in files."""
        for module in self._builtin_names():
            importlib.import_module(f"{self.package}.{module}")
        self._load_entry_points()
        return dict(sorted(self._classes.items()))

    def _builtin_names(self) -> list[str]:
        package = importlib.import_module(self.package)
        return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))

    def _load_builtin(self, name: str) -> None:
        if name in self._builtin_names():
            importlib.import_module(f"{self.package}.{name}")
        else:  # a file may register several names, or a name that is not its own
            for module in self._builtin_names():
                importlib.import_module(f"{self.package}.{module}")

    def _load_entry_points(self) -> None:
        for point in entry_points(group=self.group):
            if point.name in self._classes or point.name in self._broken:
                continue
            try:
                self._classes[point.name] = point.load()
            except Exception as error:  # noqa: BLE001 - another package's code: it must not hide what works
                self._broken[point.name] = f"{point.value}: {type(error).__name__}: {error}"

    def _from_path(self, path: str) -> type:
        source, _, attribute = path.partition(":")
        try:
            found = getattr(import_user_module(source), attribute)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{self.kind} {path!r} cannot be imported: {error}") from error
        if not isinstance(found, type):
            raise ValueError(f"{self.kind} {path!r} must be a class, got {type(found).__name__}")
        return found

    def _unknown(self, name: str) -> str:
        known = sorted(set(self._classes) | set(self._builtin_names()))
        near = difflib.get_close_matches(name, known, n=4)
        alike = [(-_similarity(name, k), not k.startswith(name[:2]), k) for k in near]  # equal: same beginning first
        hint = f"; did you mean {min(alike)[2]!r}?" if alike else ""
        if name.endswith(".py"):
            hint = f"; name the class in that file, as in {name}:MyClass"
        return f"no {self.kind} is called {name!r}{hint} (known: {', '.join(known)})"


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


ALGOS = Registry("algorithm", "asyncrl.algos", "asyncrl.algos")
ENVS = Registry("environment", "asyncrl.envs", "asyncrl.envs", mixture="mixture")


def register_algo(name: str) -> Callable[[T], T]:
    """Register an Algorithm class under `name`."""
    return ALGOS.register(name)


def register_env(name: str) -> Callable[[T], T]:
    """Register an Env class under `name`."""
    return ENVS.register(name)


def import_user_module(target: str) -> Any:
    """Import `my_pkg.module` or `path/to/file.py`, for the registrations it makes. Raises ValueError when it cannot."""
    if target.endswith(".py"):
        return _import_file(Path(target))
    _look_here()
    try:
        return importlib.import_module(target)
    except ImportError as error:
        raise ValueError(f"module {target!r}: {error}") from error


def _import_file(path: Path) -> Any:
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    # The folder is part of the name, so that two files called env.py are two modules.
    name = f"asyncrl_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(module: str) -> bool:
    _look_here()
    return importlib.util.find_spec(module) is not None


def _look_here() -> None:
    """A console script does not look for modules in the working directory; `python -m` does, and users expect it."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
