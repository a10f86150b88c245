"""Names -> classes, for algorithms and environments. Three doors: a decorator, an import path, an entry point.

    @register_env("sorting")            in a module named with --import, or in `envs/`
    --env my_pkg.my_env:MyEnv           an import path
    [project.entry-points."asyncrl.envs"] sorting = "my_pkg.my_env:MyEnv"

Files in `envs/` and `algos/` register on import; they are imported one by one as names are asked for, and all of them
only to list what there is. An unknown name is a ValueError that suggests the nearest one.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


class Registry:
    """One kind of named class. `package` holds the built-in files, `group` is the entry-point group."""

    def __init__(self, kind: str, package: str, group: str) -> None:
        self.kind, self.package, self.group = kind, package, group
        self._classes: dict[str, type] = {}

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
        """The class called `name`: registered, a built-in file of that name, an entry point, or an import path."""
        if (":" in name and "." in name.split(":")[0]) or name.endswith(".py"):
            return self._from_path(name)
        if name not in self._classes:
            self._load_builtin(name)
        if name not in self._classes:
            self._load_entry_points()
        if name not in self._classes:
            raise ValueError(self._unknown(name))
        return self._classes[name]

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
            self._classes.setdefault(point.name, point.load())

    def _from_path(self, path: str) -> type:
        module, _, attribute = path.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.kind} {path!r} cannot be imported: {error}") from error
        if not isinstance(found, type):
            raise ValueError(f"{self.kind} {path!r} must be a class, got {type(found).__name__}")
        return found

    def _unknown(self, name: str) -> str:
        known = sorted(set(self._classes) | set(self._builtin_names()))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"no {self.kind} is called {name!r}{hint} (known: {', '.join(known)})"


ALGOS = Registry("algorithm", "asyncrl.algos", "asyncrl.algos")
ENVS = Registry("environment", "asyncrl.envs", "asyncrl.envs")


def register_algo(name: str) -> Callable[[T], T]:
    """Register an Algorithm class under `name`."""
    return ALGOS.register(name)


def register_env(name: str) -> Callable[[T], T]:
    """Register an Env class under `name`."""
    return ENVS.register(name)


def import_user_module(target: str) -> Any:
    """Import `my_pkg.module` or `path/to/file.py`, for the registrations it makes. Raises ValueError when it cannot."""
    path = Path(target)
    if target.endswith(".py"):
        if not path.exists():
            raise ValueError(f"--import {target}: there is no such file")
        name = f"asyncrl_user_{path.stem}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(target)
    except ImportError as error:
        raise ValueError(f"--import {target}: {error}") from error
