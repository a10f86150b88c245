"""The examples of docs/algorithms.md, an algorithm and a loss module of one's own, by the doors that a user takes."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from losses_helpers import loss_and_gradient, make_batch, on_policy, random_sequences

from asyncrl.cli import main
from asyncrl.settings import check, load, load_run, resolve, save

torch.set_num_threads(1)
EXAMPLES = Path(__file__).parents[1] / "examples"
ALGO, LOSS = EXAMPLES / "my_algo.py", EXAMPLES / "my_loss.py"


def run_with(folder: Path, **overrides):
    run = resolve(load(None, {"run_dir": str(folder)} | {k.replace("__", "."): v for k, v in overrides.items()}))
    check(run)
    save(run)
    return run


def test_my_algo_is_short():
    assert len(ALGO.read_text().splitlines()) < 100
    assert ALGO.read_text().count("\nclass ") == 1


def test_my_algo_runs_by_name_and_reads_back_in_another_process(tmp_path):
    run = run_with(tmp_path, imports=[str(ALGO)], algo__name="my_algo", algo__failure_weight="0.2")
    assert type(run.algo).__name__ == "MyAlgo"
    assert run.algo.failure_weight == 0.2
    assert load_run(tmp_path).algo == run.algo


def test_my_algo_does_what_its_docstring_says():
    from asyncrl.registry import import_user_module

    algo = import_user_module(str(ALGO)).MyAlgo()
    np.testing.assert_array_equal(algo.advantages(np.array([[1.0, 0, 0], [1, 1, 0]])), [[1, 0, 0], [0, 0, -1]])
    _, gradient_T = loss_and_gradient(algo, *make_batch(on_policy(random_sequences(0)), "token_mean"))
    _, batch = make_batch(on_policy(random_sequences(0)), "token_mean")
    weight_T = torch.where(batch.advantages_T < 0, 0.5, 1.0)
    torch.testing.assert_close(gradient_T, -weight_T * batch.advantages_T * batch.weights_T)


def test_my_algo_has_a_page_and_a_help_text(capsys):
    assert main(["algos", "my_algo", "--import", str(ALGO)]) == 0
    page = capsys.readouterr().out
    assert "A = R - median of the group" in page
    assert "--algo.failure_weight 0.5" in page
    assert main(["train", "--import", str(ALGO), "--algo", "my_algo", "--help"]) == 0
    assert "What a failure counts" in capsys.readouterr().out


def test_stages_that_my_algo_writes_itself_are_its_own_and_their_keys_are_not_offered(capsys):
    assert main(["algos", "--import", str(ALGO)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("my_algo")]
    assert row.split()[1:5] == ["its", "own", "its", "own"]
    assert main(["algos", "my_algo", "--import", str(ALGO)]) == 0
    page = capsys.readouterr().out
    assert "advantage = its own\n      Float64 (P, G)" in page
    assert "objective = its own" in page
    assert "--algo.aggregation" in page
    assert "--algo.advantage" not in page
    assert "--algo.objective" not in page


def test_a_loss_module_runs_by_its_path_and_reads_back(tmp_path):
    run = run_with(tmp_path, algo__name=f"{LOSS}:CappedRatioLoss", algo__cap="1.5")
    assert run.algo.cap == 1.5
    again = load_run(tmp_path)
    assert again.algo == run.algo
    logprobs_T, batch = make_batch(random_sequences(0), "token_mean")
    batch.reference_T = None
    _, gradient_T = loss_and_gradient(again.algo, logprobs_T, batch)
    ratio_T = (logprobs_T.detach() - batch.behaviour_T).exp()
    wanted_T = -batch.advantages_T * batch.weights_T * ratio_T.where(ratio_T <= 1.5, torch.zeros(()).double())
    torch.testing.assert_close(gradient_T, wanted_T)


@pytest.mark.parametrize("name", ["SimpleGRPOLoss", "ReinforceLoss"])
def test_ready_made_modules_run_by_their_path(tmp_path, name):
    run = run_with(tmp_path, algo__name=f"asyncrl.losses.modules:{name}")
    assert type(load_run(tmp_path).algo) is type(run.algo)


def test_a_module_refuses_keys_that_it_does_not_use(capsys):
    code = main(["train", "--algo", f"{LOSS}:CappedRatioLoss", "--algo.clip-high", "0.3", "--dry-run"])
    assert code == 2
    assert "clip_high" in capsys.readouterr().err


def commands() -> list[str]:
    """Every command line that docs/algorithms.md shows."""
    text = (EXAMPLES.parent / "docs" / "algorithms.md").read_text()
    return [line for line in text.splitlines() if line.startswith("asyncrl ")]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_are_accepted(command, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    argv = shlex.split(command)[1:]
    assert main([*argv, "--dry-run"] if argv[0] == "train" else argv) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--import", str(ALGO), "--algo", "my_algo"], ["--algo", f"{LOSS}:CappedRatioLoss"]])
def test_examples_train_through_the_whole_engine(tmp_path, argv):
    small = {"training.steps": "2", "training.batch-size": "4", "training.warmup-sft-steps": "2", "algo.n-samples": "4"}
    small |= {"services.generator.num-replicas": "1", "services.trainer.procs": "1"}
    keys = [word for key, value in small.items() for word in (f"--{key}", value)]
    assert main(["train", *argv, *keys, "--run-dir", str(tmp_path / "run")]) == 0
