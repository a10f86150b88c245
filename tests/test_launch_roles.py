"""The roles without the launcher, as a cluster starts them: each by itself, the trainer's ranks under torchrun."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl import hosts
from asyncrl.hosts import own_address, reachable
from asyncrl.metrics import read_rows
from asyncrl.settings import load_run

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_roles_started_one_by_one_make_the_same_run(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    keys = ["--training.steps", "2", "--training.warmup-sft-steps", "2", "--training.batch-size", "4"]
    keys += ["--algo.dynamic-sampling", "false", "--checkpoint.every", "0", "--run-dir", str(run_dir)]
    asyncrl = [sys.executable, "-m", "asyncrl", "train"]
    config = subprocess.run([*asyncrl, *keys, "--dry-run"], capture_output=True, text=True, check=True).stdout
    (run_dir / "config.yaml").write_text(config)

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    role = [*asyncrl, "--run-dir", str(run_dir), "--role"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "asyncrl"]
    server = subprocess.Popen([*role, "replay"], env=env)
    generator = subprocess.Popen([*role, "generator", "--index", "0"], env=env)
    try:
        trainer = subprocess.run([*torchrun, *role[3:], "trainer"], env=env, timeout=200, check=False)
        assert trainer.returncode == 0
        assert generator.wait(30) == 0
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        generator.kill()
    rows = [row for row in read_rows(run_dir) if row["step"]]
    assert [(row["step"], row["ledger/balance"]) for row in rows] == [(1, 0), (2, 0)]
    subprocess.run([sys.executable, "-m", "asyncrl", "plot", str(run_dir)], check=True)
    assert (run_dir / "trace.json").exists()  # no launcher has written it


RANK = """
import os, sys, time
from pathlib import Path
from asyncrl.roles import die_with_parent
die_with_parent()
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.slow
def test_killing_torchs_elastic_launcher_with_9_kills_its_ranks(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    agent = subprocess.Popen([*torchrun, str(tmp_path / "rank.py"), str(tmp_path)])
    ranks = []
    try:
        until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
        ranks = [psutil.Process(int((tmp_path / name).read_text())) for name in "01"]
    finally:
        agent.kill()
        agent.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    for rank in alive:
        rank.kill()
    assert len(gone) == 2


def until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  case $1 in --nodes) nodes=$2; shift 2 ;; --ntasks | --relative) shift 2 ;; *) shift ;; esac
done
echo "nodes $nodes gpus ${CUDA_VISIBLE_DEVICES-all}: $*" >> "$CALLS"
[ "$nodes" = 1 ] && exec "$@"
for ((task = 0; task < nodes; task++)); do SLURM_PROCID=$task "$@" & done
wait
"""
"""Stands for SLURM's: every node is this machine."""


@pytest.mark.slow
def test_the_script_for_slurm_makes_a_run(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "algo: {name: dapo, dynamic_sampling: false}\n"
        "training: {steps: 2, batch_size: 4, warmup_sft_steps: 2}\n"
        "checkpoint: {every: 0}\n"
    )
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    subprocess.run([sys.executable, "-m", "asyncrl", "keys", "new", str(tmp_path / "keys")], check=True)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"OMP_NUM_THREADS": "1", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "4", "GPUS_PER_GENERATOR": "2"}
    env |= {"GENERATORS_PER_HOST": "1", "TRAINER_GPUS": "1", "PATH": path, "CALLS": str(tmp_path / "calls")}
    run_dir = tmp_path / "a run"
    command = ["bash", str(ROOT / "examples/slurm/train.sbatch"), str(config), str(run_dir)]
    script = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **env}, start_new_session=True)
    try:
        assert script.wait(300) == 0, (run_dir / "logs" / "trainer-0.log").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)  # what SLURM does when the script has ended
    rows = [row for row in read_rows(run_dir) if row["step"]]
    assert [(row["step"], row["ledger/balance"]) for row in rows] == [(1, 0), (2, 0)]
    services = load_run(run_dir).config.services
    assert (services.trainer.procs, services.generator.procs, services.generator.num_replicas) == (1, 2, 2)


def test_the_script_for_slurm_refuses_one_node(tmp_path):
    env = {**os.environ, "SLURM_JOB_NUM_NODES": "1"}
    command = ["bash", str(ROOT / "examples/slurm/train.sbatch"), "config.yaml", str(tmp_path / "run")]
    refused = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "expected --nodes 2 or more, got 1" in refused.stderr


def test_a_wildcard_address_is_told_to_others_as_one_they_can_reach():
    assert reachable("tcp://127.0.0.1:5") == "tcp://127.0.0.1:5"
    assert reachable("tcp://0.0.0.0:5") == f"tcp://{own_address()}:5"
    assert "0.0.0.0" not in reachable("tcp://0.0.0.0:5")


@pytest.mark.parametrize("named", ["127.0.1.1", OSError("no such name")])
def test_a_host_without_a_route_outside_still_tells_others_no_loopback_address(monkeypatch, named):
    def resolve(name: str) -> str:
        if isinstance(named, OSError):
            raise named
        return named

    monkeypatch.setattr(hosts, "ELSEWHERE", ("255.255.255.255", 9))  # refused, as an address without a route is
    monkeypatch.setattr(hosts.socket, "gethostbyname", resolve)
    others = [address for address in hosts._interfaces() if not address.startswith("127.")]
    assert own_address() == [*others, "127.0.0.1"][0]


def test_without_a_route_outside_the_address_of_the_hosts_name_comes_first(monkeypatch):
    monkeypatch.setattr(hosts, "ELSEWHERE", ("255.255.255.255", 9))
    monkeypatch.setattr(hosts.socket, "gethostbyname", lambda name: "10.9.8.7")
    assert own_address() == "10.9.8.7"
