"""The rooms: who may import whom, read from the source. Rooms follow the data, and nothing reaches up or sideways."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("replay", "reference", "weights", "training", "generation")
TOP = {
    "cli",
    "__main__",
    "launch",
    "supervise",
    "roles",
    "guard",
    "placement",
    "status",
    "console",
    "plot",
    "doctor",
    "summary",
    "evaluate",
    "env_trial",
}
MAY_USE = {
    "replay": set(),
    "reference": {"replay"},  # its wire, keys and client
    "weights": {"replay"},  # its keys
    "training": {"replay", "reference", "weights"},
    "generation": {"replay", "weights"},
}
"""Besides the base (types, env, algorithm, config, registry, settings, metrics, ...), which any room may use."""

CONTRACTS = ("asyncrl.generation.engine", "asyncrl.weights.messages")
"""Protocols and messages: they import no room themselves."""

ONLY_IN = {
    "zmq": ("asyncrl/replay/", "asyncrl/reference/", "asyncrl/weights/", "tests/", "benchmarks/"),
    "vllm": ("asyncrl/generation/vllm", "tests/", "benchmarks/"),
    "torch.distributed": ("asyncrl/weights/", "asyncrl/training/", "tests/", "benchmarks/"),
}
FILES = sorted(p for folder in ("asyncrl", "algos", "envs") for p in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, except for type checking only."""
    found: set[str] = set()
    for node in ast.walk(without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def without_type_checking(tree: ast.Module) -> ast.Module:
    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST:
            is_guard = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return ast.Pass() if is_guard else self.generic_visit(node)

    return Drop().visit(tree)


def rooms_used(path: Path) -> set[str]:
    """First names under `asyncrl.` that a file imports, but for pure contracts between rooms."""
    found = {m for m in imports(path) if m.startswith("asyncrl.") and not m.startswith(CONTRACTS)}
    return {m.split(".")[1] for m in found if not any(c.startswith(f"{m}.") for c in CONTRACTS)}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_module_imports_only_its_own_room_and_those_above_it(path):
    top, *rest = path.relative_to(ROOT).parts
    used = rooms_used(path)
    if top in ("algos", "envs"):
        assert not used & (set(ROOMS) | TOP)
    elif rest[0] in ROOMS:
        assert used & (set(ROOMS) | TOP) <= MAY_USE[rest[0]] | {rest[0]}
    elif path.stem not in TOP and rest[0] != "__init__.py":
        assert not used & (set(ROOMS) | TOP)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_heavy_libraries_stay_in_their_rooms(path):
    for library, homes in ONLY_IN.items():
        uses = any(m == library or m.startswith(f"{library}.") for m in imports(path))
        assert not uses or name(path).startswith(homes), f"{name(path)} imports {library}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_is_ever_unpickled(path):
    assert not imports(path) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text))
