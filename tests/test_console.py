"""What people see: the panel, plain lines, the status of a real server, and the plots."""

import io
import json
import threading
from itertools import count

import msgspec
import pytest
from rich.console import Console as Terminal

from asyncrl import Env, Prompt, register_env
from asyncrl.console import Console, Tail, plain_line, sparkline, waiting
from asyncrl.metrics import open_timer, write_progress
from asyncrl.plot import draw
from asyncrl.replay.server import open_server, write_address
from asyncrl.settings import load, resolve, save
from asyncrl.status import Poller, describe


@register_env("console_env")
class Task(Env):
    def prompts(self, start=0):
        for index in count(start):
            yield Prompt(id=index, prompt="?")


def row(step: int) -> dict:
    ledger = {
        "started": 10 * step,
        "trained": 8 * step,
        "buffered": step,
        "in_flight": step,
        "dropped": 0,
        "balance": 0,
    }
    return {
        "step": step,
        "version": step,
        "time/elapsed_s": 2.0 * step,
        "reward/mean": min(1.0, 0.1 * step),
        "staleness/mean": 0.9,
        "staleness/max": 3,
        "staleness/p95": 2,
        "replay/buffered": 5,
        "idle/trainer": 0.1,
        "idle/generator": None,
        "policy/entropy": 1.0,
        "throughput/trained_tokens_per_s": 1234.5,
        **{f"ledger/{k}": v for k, v in ledger.items()},
    }


@pytest.fixture
def run(tmp_path):
    made = resolve(load(None, {"env.name": "console_env", "run_dir": str(tmp_path), "training.steps": "9"}))
    save(made)
    return made


def write_rows(run, steps) -> None:
    with open(run.dir / "metrics.jsonl", "ab") as file:
        for step in steps:
            file.write(msgspec.json.encode(row(step)) + b"\n")


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b'{"a":1}\n{"a":')
    assert tail.read() == [{"a": 1}]
    assert tail.read() == []
    with open(path, "ab") as file:
        file.write(b"2}\n")
    assert tail.read() == [{"a": 2}]


STATUS = {
    "buffered": 5,
    "ledger": {"ledger/in_flight": 7},
    "processes": [{"role": "generator", "index": 0, "tokens_per_s": 4000.0}],
    "waiting": [{"who": "trainer 0", "for_s": 3.0, "why": "trainer has waited 3 s for 2 of 32 groups"}],
}


def test_the_panel_shows_reward_staleness_queue_speed_and_who_waits(run):
    out = io.StringIO()
    with Console(run, terminal=Terminal(file=out, force_terminal=True, width=140)) as console:
        write_rows(run, range(1, 6))
        console.update(STATUS, phase="running")
    text = out.getvalue()
    for expected in (
        "0.500",
        "mean 0.90, max 3 of at most 4",
        "5 of 128 groups, 7 in flight",
        "generated 4,000",
        "trained 1,234",
    ):
        assert expected in text, expected
    assert "waited 3 s for 2 of 32 groups" in text


def test_without_a_terminal_there_are_plain_lines_and_the_last_step_is_one(run):
    out = io.StringIO()
    with Console(run, terminal=Terminal(file=out, width=200)) as console:
        write_progress(run.dir, "warm-up 60 of 120")
        console.update({}, phase="running")
        for step in range(1, 10):
            write_rows(run, [step])
            console.update({}, phase="running")
    lines = out.getvalue().splitlines()
    assert lines[0] == "warm-up 60 of 120"
    assert lines[1].startswith("step 1/9  reward 0.100  staleness 0.90 (max 3)")
    assert lines[-1].startswith("step 9/9")


def test_a_row_with_gaps_is_still_a_line():
    assert plain_line({"step": 1, "time/elapsed_s": 1.0, "reward/mean": None}, 3) == "step 1/3  1 s"
    assert plain_line({"step": 1, "time/elapsed_s": 1.0, "sft/loss": 2.0}, 3) == "step 1/3  loss 2.000  1 s"


def test_sparklines_rise_with_their_values():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" or sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert len(sparkline([0.5] * 1000)) == 50


def test_the_longest_wait_comes_first():
    waits = {"waiting": [{"who": "a", "for_s": 1.0}, {"who": "b", "for_s": 9.0}, {"who": "c", "for_s": 0.1}]}
    assert [w["who"] for w in waiting(waits, at_least_s=1.0)] == ["b", "a"]


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path):
    with Poller(tmp_path / "gone") as poller:
        poller.phase = "failed"
    assert poller.phase == "failed"


def test_the_last_step_shows_what_its_row_knows(tmp_path):
    with Poller(tmp_path):
        pass
    for row, said in (
        ({"step": 3, "reward/mean": 0.00708}, "last step 3, reward 0.007"),
        ({"step": 3, "sft/loss": 2.0151}, "last step 3, loss 2.015"),
        ({"step": 3, "reward/mean": None}, "last step 3"),
    ):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        assert describe(tmp_path)[-1] == said


def test_the_status_of_a_real_server_is_kept_and_described(run):
    server, stop = open_server(run, bind="tcp://127.0.0.1:*"), threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,), daemon=True)
    thread.start()
    with Poller(run.dir) as poller:
        poller.phase = "running"
        poller.connect(server.address)
    stop.set()
    thread.join(10)
    server.close()
    record = json.loads((run.dir / "status.json").read_bytes())
    assert record["server"]["ledger"]["ledger/balance"] == 0
    text = "\n".join(describe(run.dir))
    assert "running, as of" in text
    assert "groups: started 0" in text


def test_without_a_launcher_the_status_comes_from_the_server_itself(run):
    """Roles that were started one by one have nobody who writes status.json."""
    server, stop = open_server(run, bind="tcp://127.0.0.1:*"), threading.Event()
    write_address(run.dir, server.address)
    thread = threading.Thread(target=server.run, args=(stop,), daemon=True)
    thread.start()
    lines = describe(run.dir)
    assert lines[0] == f"{run.dir}: running, says the replay server at {server.address}"
    assert "groups: started 0" in "\n".join(lines)
    assert "status 0" not in "\n".join(lines)
    stop.set()
    thread.join(10)
    assert server.service.peers.processes() == []
    server.close()


def test_a_server_that_does_not_answer_is_named_with_what_may_be_wrong(run, monkeypatch):
    monkeypatch.setattr("asyncrl.status.ASK_S", 0.2)
    write_address(run.dir, "tcp://127.0.0.1:9")
    assert "the replay server at tcp://127.0.0.1:9 has not answered" in describe(run.dir)[0]


def test_a_folder_without_a_run_has_no_status(tmp_path):
    with pytest.raises(ValueError, match="no run was started there"):
        describe(tmp_path)


@pytest.mark.slow
def test_plots_are_drawn_from_what_there_is(run):
    with pytest.raises(ValueError, match="nothing to draw yet"):
        draw(run.dir)
    write_rows(run, range(1, 9))
    timer = open_timer(run, role="trainer")
    with timer("step"):
        pass
    timer.close()
    written = draw(run.dir)
    assert {p.name for p in written} == {
        f"{n}.png" for n in ("reward", "staleness", "ledger", "idle", "overview", "timeline")
    }
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)
