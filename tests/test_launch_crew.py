"""Supervision: real processes are started, die in every way, and none is ever left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.guard import MARK, members
from asyncrl.replay.ledger import EndlessRejection
from asyncrl.replay.server import open_server
from asyncrl.roles import describe_exit, write_error
from asyncrl.settings import load, resolve
from asyncrl.supervise import Backoff, Crew, Spec, clear_errors, first_error, obituary
from asyncrl.types import Refusal

SLEEPER = "import time; time.sleep(600)"
FAMILY = f"""
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True) for _ in range(2)]
print("up", flush=True)
time.sleep(600)
"""


def script(text: str, role: str = "generator", index: int = 0) -> Spec:
    return Spec(role=role, index=index, command=(sys.executable, "-c", text))


def until(condition, timeout_s: float = 20.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)
    return value


def test_leaving_a_crew_leaves_no_process_however_deep_it_was_started(tmp_path):
    with Crew(tmp_path) as crew:
        child = crew.start(script(FAMILY))
        until(lambda: "up" in child.log.read_text())
        assert len(members(crew.mark)) == 3
    assert members(crew.mark) == []


def start_then_fail(crew: Crew) -> None:
    crew.start(script(SLEEPER))
    crew.start(Spec(role="generator", index=1, command=("/no/such/program",)))


def test_an_error_inside_a_crew_leaves_no_process_either(tmp_path):
    crew = Crew(tmp_path)
    with pytest.raises(FileNotFoundError), crew:
        start_then_fail(crew)
    assert members(crew.mark) == []


LAUNCHER = """
import sys, time
from pathlib import Path
from asyncrl.supervise import Crew, Spec
with Crew(Path(sys.argv[1])) as crew:
    crew.start(Spec(role="generator", index=0, command=(sys.executable, "-c", sys.argv[2])))
    print(crew.mark, flush=True)
    time.sleep(600)
"""


def test_killing_the_launcher_with_9_kills_everything_it_started(tmp_path):
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), FAMILY]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    mark = launcher.stdout.readline().strip()
    until(lambda: len(members(mark)) == 3)
    launcher.kill()
    launcher.wait()
    until(lambda: not members(mark))


def test_a_dead_process_is_reported_once_and_its_group_is_ended(tmp_path):
    with Crew(tmp_path) as crew:
        crew.start(script(FAMILY.replace("time.sleep(600)\n", "sys.exit(3)\n").replace(", start_new_session=True", "")))
        (dead,) = until(crew.take_dead)
        assert dead.process.returncode == 3
        assert crew.take_dead() == []
        until(lambda: not members(crew.mark))


def test_a_role_that_cannot_leave_an_error_file_still_prints_its_own_error_last(tmp_path):
    (tmp_path / "config.yaml").write_text("trainings: {}")
    (tmp_path / "errors").write_text("a file")
    command = [sys.executable, "-m", "asyncrl", "train", "--role", "generator", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "unknown key 'trainings'" in done.stderr.splitlines()[-1]


def test_the_first_error_in_time_wins(tmp_path):
    for index in (1, 0):
        try:
            raise RuntimeError(f"from {index}")
        except RuntimeError as error:
            write_error(tmp_path, "trainer", index, error)
        time.sleep(0.01)
    assert "from 1" in first_error(tmp_path).traceback
    assert "from 0" in first_error(tmp_path, name="trainer-0").traceback
    assert first_error(tmp_path, since=time.monotonic() + 1) is None
    clear_errors(tmp_path)
    assert first_error(tmp_path) is None


def test_a_wall_clock_that_is_set_back_hides_no_traceback(tmp_path, monkeypatch):
    """Each process sees another date: an hour earlier than the launcher saw, and earlier again."""
    with Crew(tmp_path) as crew:
        crew.start(script("import sys; sys.exit(1)"))
        (dead,) = until(crew.take_dead)
    now = time.time()
    for index, hour in ((0, 1), (1, 2)):
        monkeypatch.setattr("time.time", lambda hour=hour: now - 3600.0 * hour)
        write_error(tmp_path, "generator", index, RuntimeError(f"from {index}"))
    assert "from 0" in obituary(dead, tmp_path)


def test_an_obituary_holds_the_traceback_or_else_the_end_of_the_log(tmp_path):
    with Crew(tmp_path) as crew:
        crew.start(script("print('last words'); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
        (dead,) = until(crew.take_dead)
    text = obituary(dead, tmp_path)
    assert "generator 0 ended with killed by SIGKILL, which the kernel does when memory runs out" in text
    assert "last words" in text
    write_error(tmp_path, "generator", 0, ValueError("what it was"))
    assert "ValueError: what it was" in obituary(dead, tmp_path)


def test_an_error_that_says_all_there_is_to_say_is_shown_without_its_traceback(tmp_path):
    with Crew(tmp_path) as crew:
        crew.start(script("import sys; sys.exit(1)", role="replay"))
        (dead,) = until(crew.take_dead)
    write_error(tmp_path, "replay", 0, EndlessRejection("40 leases in a row"))
    assert obituary(dead, tmp_path) == "replay 0 ended the run: 40 leases in a row"
    assert "EndlessRejection: 40 leases" in first_error(tmp_path).traceback
    run = resolve(load(None, {"run_dir": str(tmp_path / "run")}))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(Refusal) as caught:
            open_server(run, bind=taken)
    write_error(tmp_path, "replay", 0, caught.value)
    said = f"replay 0 ended the run: the replay server cannot listen on {taken}: Address already in use"
    assert obituary(dead, tmp_path).startswith(said)
    assert "\n" not in obituary(dead, tmp_path)


def test_a_process_that_had_no_room_to_say_why_it_failed_is_spoken_for(tmp_path, monkeypatch):
    with Crew(tmp_path) as crew:
        crew.start(script("import sys; sys.exit(1)"))
        (dead,) = until(crew.take_dead)
    assert "no space" not in obituary(dead, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=4096))
    assert f"generator 0 ended with exit code 1: no space is left on the disk of {tmp_path}" in obituary(dead, tmp_path)


def test_restarts_wait_longer_each_time_and_end():
    backoff = Backoff(8)
    delays = [backoff.next_delay_s() for _ in range(9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, None]


def test_exits_are_described_for_people():
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL"


def test_processes_of_other_runs_are_never_touched(tmp_path):
    env = {**os.environ, MARK: "somebody-else"}
    other = subprocess.Popen([sys.executable, "-c", SLEEPER], env=env)
    with Crew(tmp_path) as crew:
        crew.start(script(SLEEPER))
    assert other.poll() is None
    assert psutil.pid_exists(other.pid)
    other.kill()
    other.wait()


def test_a_role_that_fails_leaves_its_traceback_for_the_launcher(tmp_path):
    (tmp_path / "config.yaml").write_text("trainings: {}")
    command = [
        sys.executable,
        "-m",
        "asyncrl",
        "train",
        "--role",
        "generator",
        "--index",
        "3",
        "--run-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    record = first_error(Path(tmp_path))
    assert (record.role, record.index) == ("generator", 3)
    assert "unknown key 'trainings'" in record.traceback
