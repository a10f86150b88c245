"""Metrics: rows reach the disk, traces open, and no tracker can stop a run."""

import json
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from asyncrl import Algorithm, Env, Episode, Group, Prompt, register_algo, register_env, trackers
from asyncrl.metrics import Epochs, Timer, merge_traces, open_timer, open_trackers, read_rows
from asyncrl.settings import load, resolve
from asyncrl.trackers import JsonlTracker, Trackers


@register_algo("metrics_algo")
class Algo(Algorithm):
    pass


@register_env("metrics_env")
class Task(Env):
    pass


def make_run(path, **overrides):
    base = {"algo.name": "metrics_algo", "env.name": "metrics_env", "run_dir": str(path)}
    return resolve(load(None, {**base, **overrides}))


def group() -> Group:
    ids = np.array([1, 2], dtype=np.int32)
    episodes = [
        Episode(
            prompt_ids=ids,
            token_ids=ids,
            logprobs=np.zeros(2, np.float32),
            versions=np.array([3, 4], np.int32),
            loss_mask=np.ones(2, bool),
            reward=float(i),
            finish_reason="stop",
            text=f"text {i}",
        )
        for i in range(4)
    ]
    return Group(lease_id=0, prompt=Prompt(id=0, prompt="p", target=[1]), episodes=episodes)


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    out = open_trackers(make_run(tmp_path))
    out.log({"step": 1, "version": 1, "reward/mean": np.float32(0.5), "mfu": float("nan")})
    (row,) = read_rows(tmp_path)
    assert row["reward/mean"] == 0.5
    assert row["mfu"] is None
    assert row["time/elapsed_s"] >= 0
    out.close()


def test_half_a_line_of_a_killed_process_is_not_a_row(tmp_path):
    out = open_trackers(make_run(tmp_path))
    out.log({"step": 1, "version": 1})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "ver')
    assert [r["step"] for r in read_rows(tmp_path)] == [1]
    out.close()


def test_resuming_cuts_the_rows_of_the_abandoned_future_and_time_goes_on(tmp_path):
    run = make_run(tmp_path)
    out = open_trackers(run)
    for step in range(1, 6):
        out.log({"step": step, "version": step, "time/elapsed_s": 10.0 * step})
    out.close()
    out = open_trackers(run, step=3)
    out.log({"step": 4, "version": 4})
    rows = read_rows(tmp_path)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert rows[-1]["time/elapsed_s"] >= 30.0
    out.close()


def test_samples_are_a_few_episodes_per_step(tmp_path):
    out = open_trackers(make_run(tmp_path, **{"metrics.samples_per_step": 2}))
    out.samples(7, [group(), group()])
    rows = read_rows(tmp_path, "samples.jsonl")
    assert [(r["step"], r["reward"], r["versions"]) for r in rows] == [(7, 0.0, [3, 4]), (7, 3.0, [3, 4])]
    out.close()


def test_the_timer_adds_up_and_starts_again():
    timer = Timer()
    timer.add("take", 1.0, 3.0)
    timer.add("take", 5.0, 6.0)
    with pytest.raises(KeyError), timer("step"):
        raise KeyError
    row = timer.row()
    assert row["time/take_s"] == 3.0
    assert row["time/step_s"] > 0
    assert timer.row() == {}


def test_the_trace_is_one_json_object_of_every_process(tmp_path):
    run = make_run(tmp_path)
    for role, index in (("trainer", 0), ("generator", 1)):
        timer = open_timer(run, role=role, index=index)
        with timer("work", step=1):
            pass
        timer.close()
    trace = json.loads(merge_traces(tmp_path).read_bytes())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 201}
    assert all(abs(e["ts"] / 1e6 - time.time()) < 60 for e in spans)


@dataclass
class Recorder:
    """A tracker that fails or hangs on demand."""

    fail_at: int = -1
    hang: threading.Event | None = None
    rows: list = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        pass

    def log(self, row) -> None:
        if self.hang is not None:
            self.hang.wait(60)
        if row["step"] == self.fail_at:
            raise ConnectionError("the server is on fire")
        self.rows.append(row["step"])

    def close(self) -> None:
        self.done.set()


def test_a_tracker_that_works_gets_every_row(tmp_path):
    recorder = Recorder()
    out = Trackers(JsonlTracker(tmp_path, after_step=0), {"mine": recorder}, 0)
    for step in range(20):
        out.log({"step": step, "version": step})
    out.close()
    assert recorder.done.is_set()
    assert recorder.rows == list(range(20))


def test_a_tracker_that_fails_is_dropped_with_a_warning(tmp_path, capsys):
    out = Trackers(JsonlTracker(tmp_path, after_step=0), {"mine": Recorder(fail_at=3)}, 0)
    for step in range(10):
        out.log({"step": step, "version": step})
    out.close()
    assert len(read_rows(tmp_path)) == 10
    assert "tracker mine is dropped, the run goes on: ConnectionError" in capsys.readouterr().err


def test_a_tracker_that_hangs_delays_neither_steps_nor_exit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    release = threading.Event()
    out = Trackers(JsonlTracker(tmp_path, after_step=0), {"mine": Recorder(hang=release)}, 0)
    start = time.monotonic()
    for step in range(2 * trackers.QUEUE_ROWS):
        out.log({"step": step, "version": step})
    out.close()
    assert time.monotonic() - start < 20
    assert len(read_rows(tmp_path)) == 2 * trackers.QUEUE_ROWS
    assert "tracker mine is dropped" in capsys.readouterr().err
    release.set()


@pytest.mark.slow
def test_wandb_offline_writes_a_run_with_the_real_library(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = open_trackers(make_run(tmp_path, **{"metrics.trackers": ["jsonl", "wandb"]}))
    for step in range(1, 4):
        out.log({"step": step, "version": step, "reward/mean": 0.1 * step})
    out.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_tensorboard_holds_the_figures_of_the_rows_and_hides_what_a_resume_repeats(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last, reward in ((1, 5, 0.25), (4, 6, 0.5)):
        out = open_trackers(make_run(tmp_path, **{"metrics.trackers": ["tensorboard"]}), step=first - 1)
        for step in range(first, last + 1):
            out.log({"step": step, "version": step, "reward/mean": reward, "length/mean": None, "why": "text"})
        out.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")]
    assert shown == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5), (5, 0.5), (6, 0.5)]
    assert set(events.Tags()["scalars"]) == {"version", "reward/mean", "time/elapsed_s"}


def test_a_folder_that_cannot_be_written_to_costs_the_trace_and_not_the_process(tmp_path, capsys):
    run = resolve(load(None, {"run_dir": str(tmp_path)}))
    (tmp_path / "logs").write_text("a file")
    with open_timer(run, role="generator", index=1)("rollout"):
        pass
    assert "generator 1 writes no trace: [Errno 17]" in capsys.readouterr().err


def test_the_epoch_never_goes_back_and_is_left_out_where_nobody_knows_it(tmp_path):
    def groups(*ids):
        return [Group(lease_id=i, prompt=Prompt(id=i, prompt=""), episodes=[]) for i in ids]

    (tmp_path / "trained.jsonl").write_text('{"step":1,"prompts":[0,2]}\n{"step":2,"prompts":[7,1]}\n')
    epochs = Epochs(tmp_path, size=5)
    assert epochs.after(groups(3, 4)) == {"data/epoch": 1.6}
    assert epochs.after(groups(9, 8)) == {"data/epoch": 2.0}
    assert Epochs(tmp_path / "new", size=5).after(groups(0, 1)) == {"data/epoch": 0.4}
    assert Epochs(tmp_path, size=None).after(groups(9)) == {}
