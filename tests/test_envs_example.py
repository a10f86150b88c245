"""The example package: installed into a fresh environment, checked there through its entry point, and run."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from asyncrl.env_check import check

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_env"


def test_a_file_with_an_environment_needs_no_package() -> None:
    found = check(f"{EXAMPLE / 'my_env' / 'vowels.py'}:VowelsTalk")
    assert found.ok, str(found)


@pytest.mark.slow
def test_the_example_package_is_installed_and_its_own_test_passes(tmp_path: Path) -> None:
    python, package = _fresh_python(tmp_path / "venv"), tmp_path / "my_env"
    shutil.copytree(EXAMPLE, package)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, str(package)], check=True, timeout=180, cwd=tmp_path)
    run = [str(python), "-m", "pytest", "-q", str(package / "tests")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def _fresh_python(folder: Path) -> Path:
    """A new environment that sees this one's packages and nothing of the example."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    seen = [path for path in sys.path if "site-packages" in path]
    (site / "outer.pth").write_text("\n".join(f"import site; site.addsitedir({path!r})" for path in seen))
    return folder / "bin" / "python"
