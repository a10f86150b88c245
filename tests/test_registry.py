"""Names become classes through three doors, and a broken door is named."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from asyncrl import registry
from asyncrl.registry import ENVS, Registry, import_user_module

SOURCE = "from asyncrl import Env\nclass Mine(Env):\n    size: int = {size}\n"


def test_an_import_path_may_be_a_module_without_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asyncrl_test_single.py").write_text(SOURCE.format(size=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as a console script has it
    assert ENVS.get("asyncrl_test_single:Mine")().size == 1


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        (tmp_path / str(size) / "env.py").write_text(SOURCE.format(size=size))
    first, second = (ENVS.get(f"{tmp_path}/{size}/env.py:Mine") for size in (1, 2))
    assert (first().size, second().size) == (1, 2)
    assert ENVS.get(f"{tmp_path}/1/env.py:Mine") is first


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere.py:Mine", "there is no file nowhere.py"),
        ("no.such.module:Mine", "cannot be imported: module 'no.such.module'"),
        ("asyncrl.env:NoSuchClass", "cannot be imported"),
        ("asyncrl.env:checked", "must be a class, got function"),
        ("no_such_module:Mine", "no environment is called 'no_such_module'"),
        ("sort_digit", "did you mean 'sort_digits'"),
        ("sort_digits:5", "takes no parameter"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        ENVS.get(name)
    assert "\n" not in str(caught.value)


def test_a_file_that_fails_is_not_half_imported(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text("raise KeyError('broken')")
    with pytest.raises(KeyError):
        import_user_module(str(path))
    path.write_text("x = 1")
    assert import_user_module(str(path)).x == 1


def test_a_broken_entry_point_is_named_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name="good", value="asyncrl.envs.sort_digits:SortDigits", group="g"),
        EntryPoint(name="bad", value="no_such_package.envs:Env", group="g"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    own = Registry("environment", "asyncrl.envs", "g")
    assert own.get("good").__name__ == "SortDigits"
    assert "good" in own.all()
    with pytest.raises(
        ValueError, match=r"'bad' cannot be imported from no_such_package\.envs:Env: ModuleNotFoundError"
    ):
        own.get("bad")
