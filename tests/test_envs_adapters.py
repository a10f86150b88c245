"""Adapters to the libraries that people use, tried on the real libraries; and what they say when those are absent."""

import asyncio
from itertools import islice
from typing import Any

import pytest

from asyncrl.env import Env
from asyncrl.env_check import check
from asyncrl.extras import require
from asyncrl.registry import ENVS
from asyncrl.scripted import play

HARD_TO_SCORE = {"composite"}  # composite has no task of its own
NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def test_a_library_that_is_absent_is_named_with_its_install() -> None:
    with pytest.raises(ValueError, match=r"environment x needs no_such_library: pip install 'asyncrl\[some-extra\]'"):
        require("no_such_library", extra="some-extra", wanted_by="environment x")


def test_listing_environments_imports_none_of_the_libraries() -> None:
    assert {"reasoning_gym", "gymnasium", "textarena"} <= set(ENVS.all())


@pytest.fixture
def reasoning_gym() -> Any:
    return pytest.importorskip("reasoning_gym")


@pytest.mark.slow
@pytest.mark.usefixtures("reasoning_gym")
def test_a_task_of_reasoning_gym_works() -> None:
    found = check("reasoning_gym:chain_sum")
    assert found.ok, str(found)


@pytest.mark.slow
def test_every_task_of_reasoning_gym_scores_its_reference_and_no_nonsense(reasoning_gym: Any) -> None:
    from reasoning_gym.factory import DATASETS

    wrong = []
    for task in sorted(set(DATASETS) - HARD_TO_SCORE):
        env: Env = ENVS.get(f"reasoning_gym:{task}")(seed=1)
        prompt = next(env.prompts(3))
        reference = env.reference(prompt)
        if (reference is None) != (task in NO_REFERENCE):
            wrong.append(f"{task}: reference {reference!r}")
        if reference is not None and env.score(reference, prompt) != 1.0:
            wrong.append(f"{task}: its reference scores {env.score(reference, prompt)}")
        for junk in ("", "zzz?", "<answer></answer>", "<answer>zzz?</answer>"):
            if not env.score(junk, prompt) <= (1.0 if task == "game_of_life_halting" else 0.5):
                wrong.append(f"{task}: {junk!r} scores {env.score(junk, prompt)}")
    assert wrong == []


@pytest.mark.slow
@pytest.mark.usefixtures("reasoning_gym")
def test_settings_of_a_task_reach_reasoning_gym() -> None:
    cls = ENVS.get("reasoning_gym:chain_sum")
    prompt = next(cls(config={"min_terms": 2, "max_terms": 2}, style="plain").prompts())
    assert prompt.prompt.count("+") + prompt.prompt.count(" - ") == 1
    assert list(islice(cls().prompts(998), 4))[2:] == list(islice(cls().prompts(1000), 2))
    with pytest.raises(ValueError, match=r"env\.config"):
        cls(config={"no_such": 1}).check()
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        ENVS.get("reasoning_gym:chain_sums")().check()


def test_a_gymnasium_environment_is_played_by_text() -> None:
    pytest.importorskip("gymnasium")
    env: Env = ENVS.get("gymnasium:FrozenLake-v1")(options={"is_slippery": False})
    env.check()
    prompt = next(env.prompts())
    model, episode = asyncio.run(play(env, prompt, ["I go 2", "2", "no idea", "1", "1", "1", "2"]))
    assert episode.reward == 1.0
    assert episode.metadata == {"turns": 7, "invalid": 1}
    shown = model.tokenizer.decode(episode.token_ids[~episode.loss_mask])
    assert "That is no action. Reply with the number of an action, 0 to 3." in shown
    assert "S[F]FF" in shown


@pytest.mark.parametrize(("id", "complaint"), [("Pendulum-v1", "Box action space"), ("Nope-v1", "doesn't exist")])
def test_a_gymnasium_environment_that_cannot_be_played_is_refused(id: str, complaint: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match=complaint):
        ENVS.get(f"gymnasium:{id}")().check()


def test_a_textarena_game_is_played_to_its_end() -> None:
    pytest.importorskip("textarena")
    env: Env = ENVS.get("textarena:GuessTheNumber-v0")()
    prompt = next(env.prompts())
    model, episode = asyncio.run(play(env, prompt, [f"[{i}]" for i in range(1, 21)]))
    assert episode.metadata["finished"]
    assert episode.reward == 1.0 or episode.metadata["turns"] >= 10
    spoken = model.tokenizer.decode(episode.token_ids[episode.loss_mask], skip_special_tokens=True)
    assert spoken.startswith("[1][2][3]")


def test_a_game_for_two_is_self_play_and_trains_one_seat() -> None:
    pytest.importorskip("textarena")
    env: Env = ENVS.get("textarena:TicTacToe-v0")(players=2)
    first, second = islice(env.prompts(), 2)
    moves = ["[0]", "[3]", "[1]", "[4]", "[2]"]
    for prompt, seat, reward in ((first, 0, 1.0), (second, 1, -1.0)):
        model, episode = asyncio.run(play(env, prompt, moves))
        assert episode.reward == reward
        spoken = model.tokenizer.decode(episode.token_ids[episode.loss_mask], skip_special_tokens=True)
        assert spoken == "".join(moves[seat::2])


def test_a_game_that_is_not_there_is_refused() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match=r"textarena:Nope-v0: .*not found"):
        ENVS.get("textarena:Nope-v0")().check()
