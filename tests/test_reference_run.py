"""A whole run with reference processes gives the losses of one whose trainer holds the reference, bit for bit."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sync_reference import train_synchronously
from training_helpers import lone_rank

from asyncrl.metrics import read_rows
from asyncrl.settings import load, num_references, resolve

KEYS = {
    "algo.name": "grpo", "algo.beta": 0.5, "algo.n_samples": 4, "algo.dynamic_sampling": False, "seed": 3,
    "training.steps": 3, "training.batch_size": 4, "training.warmup_sft_steps": 25, "training.learning_rate": 1e-2,
    "env.digits": 2, "replay.target_lag": 0, "checkpoint.every": 0, "checkpoint.export": False,
    "services.generator.num_replicas": 1, "services.trainer.procs": 1,
}  # fmt: skip
FIGURES = ("loss", "policy/kl_ref", "policy/grad_norm", "policy/entropy")


@pytest.mark.slow
def test_a_run_whose_reference_process_is_killed_equals_the_reference_in_the_trainer(tmp_path: Path):
    expected = train_synchronously(resolve(load(None, KEYS | {"run_dir": str(tmp_path / "plain")})), lone_rank())
    folder, out = tmp_path / "run", tmp_path / "out"
    keys = KEYS | {"run_dir": str(folder), "services.ref_model.num_replicas": 1}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    with open(out, "wb") as file:
        run = subprocess.Popen([sys.executable, "-m", "asyncrl", "train", *words], stdout=file, stderr=file)
    try:
        kill_reference(folder, once="holds", run=run)
        assert run.wait(200) == 0, out.read_text()
    finally:
        run.kill()
        run.wait()
    assert "reference 0 ended (killed by SIGKILL): starting it again" in out.read_text()
    rows = [row for row in read_rows(folder) if row["step"]]
    assert len(rows) == len(expected) == 3
    for row, plain in zip(rows, expected, strict=True):
        assert {name: row[name] for name in FIGURES} == {name: plain[name] for name in FIGURES}  # not approximately
        assert row["ledger/balance"] == row["staleness/max"] == 0
    assert rows[2]["policy/kl_ref"] > rows[0]["policy/kl_ref"] == 0


def kill_reference(folder: Path, *, once: str, run: subprocess.Popen[bytes]) -> None:
    """Kill -9 reference process 0 as soon as its log says so."""
    log, deadline = folder / "logs" / "reference-0.log", time.monotonic() + 150
    while not log.exists() or once not in log.read_text():
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    title = f"asyncrl reference 0 {folder}"[:60]
    (process,) = [p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or ()).startswith(title)]
    process.kill()


def test_a_loss_without_a_penalty_starts_no_process():
    config = load(None, KEYS | {"services.ref_model.num_replicas": 2, "run_dir": "unused"})
    assert num_references(resolve(config)) == 2
    config.algo["beta"] = 0.0
    assert num_references(resolve(config)) == 0
