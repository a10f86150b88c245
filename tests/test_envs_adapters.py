"""Adapters to the libraries that people use, tried on the real libraries; and what they say when those are absent."""

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncrl.chat import Chat
from asyncrl.endpoint import Session, as_messages
from asyncrl.env import Env
from asyncrl.env_check import check
from asyncrl.extras import require
from asyncrl.registry import ENVS
from asyncrl.scripted import Scripted, byte_tokenizer, play
from asyncrl.types import Episode

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


TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float((trace.messages[-1].content or "").strip() == self.data.answer)

class Sums(vf.Taskset[SumTask]):
    def load(self):
        for i in range(5):
            yield SumTask(Data(prompt=f"{i}+1=", answer=str(i + 1)), self.config.task)

__all__ = ["Sums"]
"""


@pytest.mark.slow
def test_a_verifiers_environment_runs_its_own_rollout_on_our_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "asyncrl_test_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    env: Env = ENVS.get("verifiers:asyncrl_test_sums")()
    env.check()
    prompts = list(islice(env.prompts(), 7))
    assert {p.metadata["task"] for p in prompts[:5]} == set(range(5))
    assert prompts[3:] == list(islice(env.prompts(3), 4))

    async def run() -> tuple[Any, Any]:
        right = play(env, prompts[0], str(prompts[0].metadata["task"] + 1))
        return await asyncio.gather(right, play(env, prompts[1], "no"))

    (model, right), (_, wrong) = asyncio.run(run())
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert (right.token_ids == model.calls[0].token_ids).all()
    with pytest.raises(ValueError, match="verifiers:no_such_taskset: taskset 'no_such_taskset' not found"):
        ENVS.get("verifiers:no_such_taskset")().check()


def test_the_endpoint_continues_a_conversation_and_notices_a_rewritten_one() -> None:
    session = Session(Scripted(Env(), ["one", "two", "three"], chat=Chat(tokenizer=byte_tokenizer())))
    first = [{"role": "user", "content": "a"}]

    async def run() -> Episode:
        text, *_ = await session.reply(first, None)
        await session.reply([*first, {"role": "assistant", "content": text}, {"role": "tool", "content": "b"}], None)
        assert session.num_restarts == 0
        before = session.talk
        assert before is not None
        await session.reply([{"role": "user", "content": "summary of a and b"}], None)
        assert session.num_restarts == 1
        return before.episode(1.0)

    episode = asyncio.run(run())
    spoken = byte_tokenizer().decode(episode.token_ids[episode.loss_mask])
    assert spoken == "one<|im_end|>two<|im_end|>"


@pytest.mark.parametrize(
    "body", [{"tools": [{}]}, {"n": 2}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]
)
def test_the_endpoint_refuses_what_it_cannot_answer(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="request"):
        as_messages({"messages": [], **body})
