"""avg@n and pass@k: the estimates, and a whole evaluation on the local engine."""

import asyncio
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import cli, settings
from asyncrl.env import Env, Generate
from asyncrl.evaluate import of_trained
from asyncrl.generation.evaluation import Response, evaluate, failures, pass_at_k, summarise
from asyncrl.metrics import Evaluated
from asyncrl.registry import ENVS
from asyncrl.scripted import Scripted
from asyncrl.types import Prompt


@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([i < correct for i in range(n)], k))
    assert math.isclose(pass_at_k(n, correct, k), np.mean([any(draw) for draw in draws]))


def responses(rewards: list[list[float]]) -> list[Response]:
    return [
        Response(prompt=p, sample=s, asked="q", target="t", reward=reward, rewards={"part": reward / 2}, num_tokens=3)
        for p, row in enumerate(rewards)
        for s, reward in enumerate(row)
    ]


def test_means_are_over_prompts_with_intervals() -> None:
    figures = summarise(responses([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]), full_marks=1.0)
    assert list(figures) == ["avg@4", "pass@1", "pass@2", "pass@4", "reward/part", "length"]
    assert figures["avg@4"].mean == figures["pass@1"].mean == pytest.approx(0.5)
    assert figures["pass@4"].mean == pytest.approx(2 / 3)
    assert figures["avg@4"].half_width == pytest.approx(1.96 * 0.5 / math.sqrt(3))


def test_partial_credit_is_no_pass() -> None:
    figures = summarise(responses([[0.9], [0.9]]), full_marks=1.0)
    assert (figures["avg@1"].mean, figures["pass@1"].mean) == (pytest.approx(0.9), 0.0)


def test_all_right_is_not_certainty() -> None:
    assert summarise(responses([[1.0]] * 30), full_marks=1.0)["pass@1"].half_width == pytest.approx(0.1)


def test_a_failed_rollout_counts_as_zero_and_is_named() -> None:
    class Fragile(Env):
        def prompts(self, start=0):  # type: ignore[no-untyped-def]
            yield from (Prompt(id=i, prompt="p", target=i) for i in range(start, 4))

        async def rollout(self, prompt, generate):  # type: ignore[no-untyped-def]
            if prompt.id == 0:
                raise KeyError("no")
            if prompt.id == 1:
                await asyncio.Event().wait()
            return await super().rollout(prompt, generate)

        def score(self, text, prompt):  # type: ignore[no-untyped-def]
            return 1.0

    def make(prompt: Prompt, sample: int) -> Generate:
        return Scripted(Fragile(), "x")

    found = asyncio.run(evaluate(Fragile(), make, num_prompts=4, n=2, concurrency=3, timeout_s=0.2))
    assert [(r.prompt, r.sample) for r in found] == [(p, s) for p in range(4) for s in range(2)]
    assert failures(found) == {"KeyError": 2, "TimeoutError": 2}
    assert summarise(found, full_marks=1.0)["avg@2"].mean == 0.5


def test_evaluation_prompts_are_not_the_training_prompts() -> None:
    for name in ("sort_digits", "countdown:0.5,arithmetic:0.5"):
        env = ENVS.get(name)(seed=3)
        ours = {p.prompt for p in itertools.islice(env.evaluation().prompts(), 20)}
        assert len(ours & {p.prompt for p in itertools.islice(env.prompts(), 20)}) <= 2


def test_several_greedy_responses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"eval\.temperature 0 gives 8 times the same"):
        settings.resolve(settings.load(None, {"eval.n": "8", "eval.temperature": "0"}))
    assert settings.resolve(settings.load(None, {"eval.n": "8"})).config.eval.temperature == 1.0
    assert settings.resolve(settings.load(None, {})).config.eval.temperature == 0.0


def test_what_a_run_trained_is_evaluated_with_settings_of_its_own(tmp_path: Path) -> None:
    settings.save(settings.resolve(settings.load(None, {"run_dir": str(tmp_path), "env.name": "countdown"})))
    with pytest.raises(ValueError, match="holds no trained model"):
        of_trained(str(tmp_path), {})
    (tmp_path / "model").mkdir()
    run = of_trained(str(tmp_path), {"eval.n": "8"})
    assert (run.config.eval.n, run.config.eval.temperature) == (8, 1.0)
    assert (run.config.model.path, run.config.run_dir) == (str(tmp_path / "model"), str(tmp_path / "eval"))


def test_each_line_of_evaluations_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_bytes(b'{"eval/version": 0}\n')
    evaluated = Evaluated(tmp_path)
    assert evaluated.new() == {}
    with (tmp_path / "eval.jsonl").open("ab") as file:
        file.write(b'{"eval/version": 4}\n{"eval/ver')
        file.flush()
        assert evaluated.new() == {"eval/version": 4}
        assert evaluated.new() == {}
        file.write(b'sion": 8}\n')
    assert evaluated.new() == {"eval/version": 8}


@pytest.mark.slow
def test_the_command_evaluates_a_model_and_writes_its_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["eval", "--model", "tiny", "--env", "number_guessing", "--n", "2", "--eval.num-prompts", "3"]
    assert cli.main([*command, "--training.seq-len", "128"]) == 0
    printed = capsys.readouterr().out
    assert "number_guessing: 3 prompts x 2 responses of tiny" in printed
    assert "pass@2" in printed
    lines = (tmp_path / "runs" / "eval" / "responses.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [0, 0, 1, 1, 2, 2]
    figures = (tmp_path / "runs" / "eval" / "eval.json").read_bytes()
    for n in ("1", "3"):
        assert cli.main([*command, "--n", n, "--training.seq-len", "128", "--run-dir", "runs/eval"]) == 0
    folder = tmp_path / "runs" / "eval"
    assert (folder / "eval.000.json").read_bytes() == figures
    assert [len((folder / f"responses{k}.jsonl").read_text().splitlines()) for k in (".000", ".001", "")] == [6, 3, 9]
