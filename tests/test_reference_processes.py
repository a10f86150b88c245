"""Reference processes: what they answer is what the trainer's own reference computes, and a death loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_helpers import serving
from test_training_step import batch
from training_helpers import config_for, lone_policy, lone_rank, make_learner

from asyncrl.algos.grpo import GRPO
from asyncrl.models import save_tiny
from asyncrl.reference import client as client_module
from asyncrl.reference.client import ReferenceClient
from asyncrl.reference.directory import Directory
from asyncrl.reference.messages import Packed, Score, pack_score, unpack_score
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.keys import load_keys, new_keys
from asyncrl.settings import load, num_references, resolve, save
from asyncrl.training.batch import MicroBatch, make_micro_batch, micro_batches
from asyncrl.training.model import load_policy
from asyncrl.training.ranks import make_mesh
from asyncrl.training.reference import initial_model, make_reference, make_remote_reference, packed_of
from asyncrl.training.reference_process import score

TEMPERATURE = 0.7


def many_micro_batches(config) -> list[MicroBatch]:
    """One batch packed small, and a micro-batch of nothing, as a rank with little to do gets it."""
    config.training.tokens_per_micro_batch = 32
    sequences = batch(GRPO(), config)
    (micros,) = micro_batches(sequences, config=config, ranks=lone_rank())
    assert len(micros) >= 6
    return [*micros, make_micro_batch(sequences, [], "cpu", "sdpa")]


def arrays(**changes) -> Packed:
    parts = {"lengths": np.array([2, 3]), "token_ids_S": np.arange(5), "predictors_T": np.array([0, 3])}
    return Packed(**{**parts, **changes})


def test_a_micro_batch_survives_the_wire_and_nonsense_is_refused():
    body, payload = pack_score(arrays(), model="tiny", temperature=0.5)
    back = unpack_score(body, [payload])
    for name in ("lengths", "token_ids_S", "predictors_T"):
        assert (getattr(back, name) == getattr(arrays(), name)).all()
    for wrong, why in (
        ({"lengths": np.array([2, 2])}, "do not make"),
        ({"lengths": np.array([5, 0])}, "do not make"),
        ({"token_ids_S": np.arange(-1, 4)}, "at least 0"),
        ({"predictors_T": np.array([4])}, "before the last"),
        ({"predictors_T": np.array([-1])}, "before the last"),
    ):
        body, payload = pack_score(arrays(**wrong), model="tiny", temperature=0.5)
        with pytest.raises(ValueError, match=why):
            unpack_score(body, [payload])
    with pytest.raises(ValueError, match="expected one frame of"):
        unpack_score(Score(model="tiny", temperature=1.0, sizes=(1, 1 << 20, 0)), [b"1234"])


def test_the_policy_without_its_adapters_is_the_model_that_processes_hold():
    config = config_for(learning_rate=1e-2)
    config.training.lora.rank = 4
    ranks = lone_rank()
    learner = make_learner(GRPO(beta=0.0), config, ranks)
    sequences = batch(learner.algo, config)
    (micro,) = micro_batches(sequences, config=config, ranks=ranks)[0]
    for step in (1, 2):
        learner.train(sequences, step=step)
    mesh = make_mesh(config.parallelism, ranks)
    (own,) = make_reference(config, learner.policy, ranks, mesh, initial="tiny", temperature=TEMPERATURE)([micro])
    held = load_policy(config, ranks, mesh, path="tiny", trained=False)
    assert torch.equal(own, torch.from_numpy(score(held, packed_of(micro), ranks, temperature=TEMPERATURE)))


class Processes:
    """Reference processes as the launcher starts them, on the books of a replay server in a thread."""

    def __init__(self, run, address: str, number: int) -> None:
        self.run, self.address = run, address
        self.curve = load_keys(run.config.replay.keys, "client")
        self.started = [self.start(index) for index in range(number)]
        self.clients: list[ReferenceClient] = []

    def start(self, index: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "asyncrl", "train", "--role", "reference", "--index", str(index)]
        command += ["--run-dir", str(self.run.dir), "--address", self.address]
        with open(self.run.dir / f"{index}.log", "ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def client(self, rank: int) -> ReferenceClient:
        directory = Directory(ReplayClient(self.address, role="trainer", index=rank, curve=self.curve))
        made = ReferenceClient(
            model=initial_model(self.run),
            rank=rank,
            num_replicas=2,
            directory=directory,
            limit_s=90.0,
            curve=self.curve,
        )
        self.clients.append(made)
        deadline = time.monotonic() + 60
        while sum(replica.there for replica in made._replicas.values()) < 2:
            made.start()
            assert time.monotonic() < deadline, [log.read_text() for log in self.run.dir.glob("*.log")]
        return made


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Two of them, with CURVE keys."""
    new_keys(tmp_path / "keys")
    keys = {"algo.name": "grpo", "services.ref_model.num_replicas": 2, "replay.keys": str(tmp_path / "keys")}
    keys |= {"training.dtype": "float32", "supervise.heartbeat_s": 0.2, "training.warmup_sft_steps": 0}
    run = resolve(load(None, {**keys, "run_dir": str(tmp_path / "run")}))
    assert num_references(run) == 2
    save(run)
    save_tiny(run.dir / "initial", seed=5)  # what a warm-up leaves behind, and a resume finds beside newer checkpoints
    with serving(run) as server:
        made = Processes(run, server.address, 2)
        try:
            yield made
        finally:
            for process in made.started:
                process.kill()
                process.wait()
            for client in made.clients:
                client.close()


@pytest.mark.slow
def test_processes_answer_bit_for_bit_what_the_trainer_computes_and_one_may_die(processes, monkeypatch):
    config, ranks = config_for(), lone_rank()
    micros = many_micro_batches(config)
    mesh = make_mesh(config.parallelism, ranks)
    start = initial_model(processes.run)
    own = make_reference(config, lone_policy(config), ranks, mesh, initial=start, temperature=TEMPERATURE)
    expected = list(own(micros))
    first, second = processes.client(0), processes.client(1)
    remote = [make_remote_reference(c, ranks, temperature=TEMPERATURE) for c in (first, second)]
    both = [reference(micros) for reference in remote]
    for mine, theirs, truth in zip(*both, expected, strict=True):
        assert torch.equal(mine, truth)
        assert torch.equal(theirs, truth)
    assert first.figures()["reference/asked_again"] == 0

    processes.started[1].send_signal(signal.SIGSTOP)  # what it is given now it will not answer
    answers = remote[0](micros)
    held = len(first._replicas[1].open)
    assert held >= 2
    assert torch.equal(next(answers), expected[0])
    processes.started[1].kill()
    for mine, truth in zip(answers, expected[1:], strict=True):
        assert torch.equal(mine, truth)
    assert first.figures()["reference/asked_again"] == held

    with pytest.raises(RuntimeError, match="token id 99 is not among the"):
        next(first.ask([arrays(token_ids_S=np.array([1, 2, 3, 4, 99]))], temperature=1.0))
    first._model = "other"
    with pytest.raises(RuntimeError, match=r"it holds .*initial and is asked for other"):
        next(first.ask([arrays()], temperature=1.0))
    processes.started[0].kill()
    monkeypatch.setattr(client_module, "TELL_S", 0.1)
    second._limit_s = 1.0
    with pytest.raises(TimeoutError, match="trainer rank 1 has waited 1 s for reference log-probabilities") as told:
        list(remote[1](micros))
    count = len(micros) - 1  # the empty one is not asked about
    assert f"{count} of {count} micro-batches are missing" in str(told.value)
    assert "reference 0 cannot be reached" in str(told.value)
    status = ReplayClient(processes.address, role="status", curve=processes.curve).status()
    assert {(p["role"], p["index"]) for p in status["processes"]} >= {("reference", 0), ("reference", 1)}
    (wait,) = status["waiting"]
    assert wait["who"] == "trainer rank 1"
    assert "reference 1 cannot be reached" in wait["why"]
