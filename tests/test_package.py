"""The package: a wheel that works without this checkout, and a README whose commands exist."""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from asyncrl.arguments import parse
from asyncrl.cli import COMMANDS

ROOT = Path(__file__).parent.parent


def sh(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory) -> Path:
    """A venv with nothing of ours but the wheel; third-party packages come from the venv that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, so that building leaves nothing in the checkout
    for name in ("asyncrl", "algos", "envs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    sh(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source)
    (wheel,) = folder.glob("asyncrl-*.whl")
    home = folder / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    outer = [p for p in sys.path if p.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(outer))
    sh(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python


@pytest.mark.slow
def test_the_wheel_brings_the_command_and_every_built_in(clean_python, tmp_path):
    where = sh(clean_python, "-c", "import asyncrl.algos, asyncrl.envs; print(asyncrl.algos.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(clean_python.parent.parent)
    command = clean_python.parent / "asyncrl"
    assert "\ndapo " in sh(command, "algos", cwd=tmp_path)
    assert "\nsort_digits " in sh(command, "envs", cwd=tmp_path)
    assert "name: dapo" in sh(command, "train", "--algo", "dapo", "--dry-run", cwd=tmp_path)


@pytest.mark.slow
def test_the_short_names_do_not_exist_as_packages(clean_python, tmp_path):
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('algos', 'envs')])"
    assert sh(clean_python, "-c", code, cwd=tmp_path) == "[None, None]\n"


def test_the_folders_refuse_to_be_imported_under_a_short_name():
    done = subprocess.run([sys.executable, "-c", "import algos"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "import this package as 'asyncrl.algos'" in done.stderr


def readme_commands(program: str) -> list[str]:
    """Command lines in the README's code blocks that start with `program`."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.split()[:1] == [program]]


def test_every_asyncrl_command_in_the_readme_exists():
    commands = readme_commands("asyncrl")
    assert len(commands) > 5
    for line in commands:
        assert parse(line.split()[1:]).command in COMMANDS, line


def test_every_training_command_in_the_readme_resolves(capsys):
    from asyncrl.cli import main

    for line in readme_commands("asyncrl"):
        words = line.split()[1:]
        needs_more = {"--resume", "--import", "--config", "vllm"} & set(words) or "my_" in line
        if words[0] == "train" and not needs_more:
            assert main([*words, "--dry-run"]) == 0, line
    capsys.readouterr()


@pytest.mark.slow
def test_the_environment_in_the_readme_works(tmp_path, capsys, monkeypatch):
    from asyncrl.cli import main

    (source,) = re.findall(r"```python\n(# my_env\.py.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "my_env.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for line in readme_commands("asyncrl"):
        if "my_env.py" in line:
            extra = ["--dry-run"] if "train" in line else []
            assert main([*line.split()[1:], *extra]) == 0, capsys.readouterr()


def test_every_make_target_in_the_readme_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = readme_commands("make")
    assert commands
    for line in commands:
        assert set(w for w in line.split()[1:] if "=" not in w) <= targets, line


def test_every_example_resolves(capsys):
    from asyncrl.cli import main

    examples = sorted((ROOT / "examples").glob("*.yaml"))
    assert examples
    for path in examples:
        code = main(["train", "--config", str(path), "--dry-run"])
        err = capsys.readouterr().err
        assert code == 0 or "not installed" in err, f"{path}: {err}"
