"""The tasks that are made up on the spot, and mixtures of them."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import keys
from asyncrl.env import Env, total
from asyncrl.envs.countdown import Countdown
from asyncrl.registry import ENVS
from asyncrl.settings import load, resolve

MADE_UP = ["sort_digits", "token_reversal", "arithmetic", "countdown", "countdown:0.7,arithmetic:0.3"]


@pytest.mark.parametrize("name", MADE_UP)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), start=st.integers(0, 2500))
def test_any_position_of_the_stream_is_the_same_from_any_start(name: str, seed: int, start: int) -> None:
    cls = ENVS.get(name)
    from_there = list(islice(cls(seed=seed).prompts(start), 5))
    assert [p.id for p in from_there] == list(range(start, start + 5))
    before = min(start, 3)
    assert from_there == list(islice(cls(seed=seed).prompts(start - before), before + 5))[before:]


@pytest.mark.parametrize("name", MADE_UP)
def test_reference_answers_score_full_marks_and_nonsense_scores_nothing(name: str) -> None:
    env: Env = ENVS.get(name)(seed=1)
    for prompt in islice(env.prompts(), 50):
        assert total(env.score(env.reference(prompt), prompt)) == env.full_marks
        for junk in ("", "x", "\x00", "9" * 1000, "(" * 500):
            assert total(env.score(junk, prompt)) == 0


@pytest.mark.parametrize("name", MADE_UP)
def test_demonstrations_do_not_give_the_task_away(name: str) -> None:
    env: Env = ENVS.get(name)()
    shown = list(islice(env.demonstrations(), 400))
    assert shown[100:110] == list(islice(env.demonstrations(100), 10))
    answers = {prompt.prompt: prompt for prompt in islice(env.prompts(), 3000)}
    known = [(answers[p], response) for p, response in shown if p in answers]
    assert sum(total(env.score(response, prompt)) for prompt, response in known) <= 0.2 * len(known) + 3


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_chat_style_asks_in_messages_and_reads_tags(name: str) -> None:
    env: Env = ENVS.get(name)(style="chat")
    prompt = next(env.prompts())
    assert prompt.prompt[0]["role"] == "user"
    assert total(env.score("thinking... " + env.reference(prompt), prompt)) == 1.0
    assert total(env.score(str(prompt.target), prompt)) == 0.0


def test_countdown_uses_each_number_exactly_once() -> None:
    env = Countdown(format_reward=0.1)
    prompt = next(env.prompts())
    left, *rest = prompt.metadata["numbers"]
    assert env.score("+".join(map(str, [left, left, *rest])), prompt) == 0.0
    wrong = "-".join(map(str, prompt.metadata["numbers"])) + "-0"
    assert env.score(wrong, prompt) == 0.0
    assert env.score(f"{prompt.metadata['solution']} = {prompt.target}", prompt) == 1.0


def test_token_reversal_gives_credit_for_positions() -> None:
    env = ENVS.get("token_reversal")(partial=0.5, length=4)
    prompt = next(env.prompts())
    first = prompt.target[0]
    assert env.score(first + "".join("a" if c != "a" else "b" for c in prompt.target[1:]), prompt) == {
        "exact": 0.0,
        "positions": 0.125,
    }


def test_a_mixture_holds_its_proportions_exactly() -> None:
    env: Env = ENVS.get("countdown:0.7,arithmetic:0.2,sort_digits:0.1")()
    prompts = list(islice(env.prompts(), 1000))
    assert Counter(p.metadata["env"] for p in prompts) == {"countdown": 700, "arithmetic": 200, "sort_digits": 100}
    inner = [p.metadata["env_id"] for p in prompts if p.metadata["env"] == "arithmetic"]
    assert inner == list(range(200))


def test_components_of_a_mixture_have_sections_of_their_own() -> None:
    cls = ENVS.get("countdown,arithmetic:2")
    env = keys.convert({"countdown": {"numbers": "4"}, "arithmetic": {"terms": 3}}, cls, section="env")
    assert (env.countdown.numbers, env.arithmetic.terms) == (4, 3)
    with pytest.raises(ValueError, match=r"env\.countdown\.number"):
        keys.convert({"countdown": {"nubmers": 4}}, cls, section="env")


def test_a_part_of_a_mixture_reads_its_own_dataset_with_the_columns_it_has_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n')
    named = {"env": {"name": "dataset:1,countdown:1", "dataset": {"dataset": {"path": str(tmp_path / "rows.jsonl")}}}}
    run = resolve(load(None, named))
    prompts = [p for p, _ in zip(run.env.prompts(), range(20), strict=False)]
    assert {p.target for p in prompts if p.metadata["env"] == "dataset"} == {"2", "3"}
    again = resolve(load(None, {"env": run.config.env}))  # as a run folder keeps it
    assert again.env == run.env
    with pytest.raises(ValueError, match=r"dataset\.path has no effect.*env\.dataset\.dataset\.path"):
        resolve(load(None, {"env.name": "dataset:1,countdown:1", "dataset.path": "x.jsonl"}))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("countdwn:0.7,arithmetic:0.3", "did you mean 'countdown'"),
        ("countdown:0,arithmetic", "must be positive"),
        ("countdown,countdown", "twice"),
        ("countdown:three", "takes no parameter"),
        ("mixture", "named by its parts"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_words(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ENVS.get(name)()


@pytest.mark.parametrize(
    ("name", "key"), [("countdown", "numbers"), ("arithmetic", "terms"), ("token_reversal", "length")]
)
def test_sizes_below_the_smallest_task_are_refused(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ENVS.get(name)(**{key: 0})


def test_bare_style_takes_the_last_number_of_a_response():
    env: Env = ENVS.get("arithmetic")(style="bare", digits=2)
    prompt = next(env.prompts())
    assert env.score(f"It is {prompt.target}.", prompt) == 1.0
    assert env.score(f"{prompt.target} or 1000", prompt) == 0.0
    assert env.score("no idea", prompt) == 0.0
