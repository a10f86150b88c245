"""`asyncrl envs check` finds what is wrong with an environment and says it in words."""

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli import main
from asyncrl.env_check import Report, check
from asyncrl.env_trial import listen
from asyncrl.registry import ENVS

HEAD = """
from itertools import count
import numpy as np
from asyncrl import Conversation, Env, Prompt, register_env

class Good(Env):
    def prompts(self, start=0):
        for i in count(start):
            yield Prompt(id=i, prompt="p", target="t")
    def score(self, text, prompt):
        return float(text == prompt.target)
    def reference(self, prompt):
        return prompt.target
"""


def report(tmp_path: Path, body: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return str(check(f"{path}:Mine"))


def test_a_good_environment_works(tmp_path: Path) -> None:
    assert report(tmp_path, "class Mine(Good):\n    pass").endswith("works")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("class Other: pass", "cannot be built"),
        ("class Mine: pass", "must subclass asyncrl.Env"),
        ("class Mine(Good):\n    def prompts(self, start=0):\n        yield from ()", "yields nothing"),
        ("class Mine(Good):\n    def prompts(self, start=0):\n        yield 'text'", "must yield asyncrl.Prompt"),
        (
            "class Mine(Good):\n    def prompts(self, start=0):\n        yield from super().prompts(start + 1)",
            "ids must be positions",
        ),
        (
            "class Mine(Good):\n    def prompts(self, start=0):\n        return super().prompts(0)",
            "would lose its place",
        ),
        (
            "import random\nclass Mine(Good):\n    def prompts(self, start=0):\n"
            "        yield Prompt(id=0, prompt=str(random.random()))",
            "other prompts the second time",
        ),
        (
            "class Mine(Good):\n    def prompts(self, start=0):\n"
            "        yield Prompt(id=0, prompt='p', target=object())",
            "cannot travel",
        ),
        (
            "class Mine(Good):\n    def score(self, text, prompt):\n        return 0.5",
            "its own reference response scores 0.5",
        ),
        ("class Mine(Good):\n    def score(self, text, prompt):\n        return 1.0", "nonsense scores 1 too"),
        (
            "class Mine(Good):\n    def score(self, text, prompt):\n        return 1.1 * (text == prompt.target)",
            "scores 1.1, not 1; the response was",
        ),
        (
            "class Mine(Good):\n    def score(self, text, prompt):\n        return 1.1 * (text == prompt.target)",
            "set `full_marks: ClassVar = ...`",
        ),
        (
            "class Mine(Good):\n    def score(self, text, prompt):\n        return None",
            "must be a number, got NoneType",
        ),
        ("class Mine(Good):\n    def score(self, text, prompt):\n        return float('nan')", "must be finite"),
        ("class Mine(Good):\n    def score(self, text, prompt):\n        return {}['x']", "KeyError: 'x'"),
        (
            "class Mine(Good):\n    async def rollout(self, prompt, generate):\n        return 1",
            "must return asyncrl.Episode",
        ),
        (
            "class Mine(Good):\n    async def rollout(self, prompt, generate):\n"
            "        episode = await super().rollout(prompt, generate)\n"
            "        episode.token_ids = episode.token_ids[::-1].copy()\n        return episode",
            "was text encoded again?",
        ),
        (
            "class Mine(Good):\n    async def rollout(self, prompt, generate):\n"
            "        talk = Conversation(generate, 'p')\n        await talk.generate()\n        talk.observe('tool')\n"
            "        await talk.generate()\n        episode = talk.episode(1.0)\n"
            "        episode.loss_mask[:] = True\n        return episode\n"
            "    def reference(self, prompt):\n        return ['a', 'b']",
            "tokens are trained that the model did not sample",
        ),
        (
            "class Mine(Good):\n    async def rollout(self, prompt, generate):\n"
            "        talk = Conversation(generate, 'p')\n        while True:\n            await talk.generate()\n"
            "    def reference(self, prompt):\n        return None",
            "bound the number of turns",
        ),
        (
            "class Mine(Good):\n    def score_group(self, episodes, prompt):\n        return episodes[:1]",
            "must return every sibling",
        ),
    ],
)
def test_what_is_wrong_is_said_in_words(tmp_path: Path, body: str, complaint: str) -> None:
    text = report(tmp_path, body)
    assert "WRONG" in text
    assert complaint in text


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        ("prompts(self, start=0): import os; os._exit(3)", "first prompts ended the process it ran in (exit code 3)"),
        ("score(self, text, prompt): raise KeyboardInterrupt", "raises KeyboardInterrupt, which would end the process"),
    ],
)
def test_an_environment_that_ends_its_process_does_not_end_the_check(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, complaint: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + f"class Mine(Good):\n    def {method}\n")
    assert main(["envs", "check", f"{path}:Mine"]) == 1
    out, err = capfd.readouterr()
    assert "   ok  Mine is built\n" in out
    assert complaint in out.splitlines()[-2]
    assert out.splitlines()[-1].endswith("does not work: 1 thing wrong")
    assert err == ""


def test_a_step_that_does_not_come_back_is_named_with_the_line_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "stuck.py"
    path.write_text(
        "import faulthandler, signal, sys\nfaulthandler.register(signal.SIGUSR1, file=sys.stdout)\n"
        "def score():\n    while True: pass\n"
        """print('{"type":"Step","what":"rollout of prompt 0","ours":false}', flush=True)\nscore()\n"""
    )
    found = Report(target="mine")
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE) as process:
        listen(found, process, limit_s=0.2)
        process.kill()
    where = f"it stands in score ({path}:4)"
    assert found.findings[0].text.startswith(f"rollout of prompt 0 has not come back within 0.2 s; {where}")
    assert not found.ok


def test_what_the_tiny_model_cannot_hold_is_a_warning(tmp_path: Path) -> None:
    body = "class Mine(Good):\n    def prompts(self, start=0):\n"
    body += "        for i in count(start):\n            yield Prompt(id=i, prompt='p' * 53, target='t')"
    assert "too_long: with a response of up to generation.max_tokens 12 a conversation takes 65" in report(
        tmp_path, body
    )
    (tmp_path / "fits").mkdir()
    assert "too_long" not in report(tmp_path / "fits", body.replace("53", "52"))


def test_importing_torch_is_noticed(tmp_path: Path) -> None:
    assert "imports torch" in report(tmp_path, "import torch\nclass Mine(Good):\n    pass")


@pytest.mark.parametrize("name", ["sort_digits", "number_guessing", "calculator", "countdown:0.5,calculator:0.5"])
def test_the_environments_that_come_with_it_work(name: str) -> None:
    found = check(name)
    assert found.ok, str(found)
    assert "too_long" not in str(found)


def test_validate_proves_that_references_score_full_marks() -> None:
    for name in ("number_guessing", "calculator", "token_reversal"):
        assert asyncio.run(ENVS.get(name)().validate()) == []
    assert "scores 0, not 1" in asyncio.run(ENVS.get("number_guessing")(max_turns=1, largest=1000).validate())[0]


def test_calls_of_the_tool_are_trained_and_its_results_are_not() -> None:
    from asyncrl.scripted import play

    env = ENVS.get("calculator")(tool_reward=0.5)
    prompt = next(env.prompts())
    model, episode = asyncio.run(play(env, prompt, env.reference(prompt)))
    tokenizer = model.tokenizer
    assert tokenizer.decode(episode.token_ids[~episode.loss_mask]).count(f"<result>{prompt.target}</result>") == 1
    spoken = "".join(env.reference(prompt))
    assert tokenizer.decode(episode.token_ids[episode.loss_mask], skip_special_tokens=True) == spoken
    assert (np.diff(np.flatnonzero(episode.loss_mask)) > 1).sum() == 1  # two spoken runs, one shown between them
    assert episode.rewards == {"correct": 1.0, "tool": 0.5}
    assert episode.metadata["calls"] == 1


def test_a_group_level_reward_sees_all_siblings(tmp_path: Path) -> None:
    from asyncrl.scripted import play

    path = tmp_path / "ranked.py"
    path.write_text(
        HEAD
        + textwrap.dedent("""
        class Mine(Good):
            def score_group(self, episodes, prompt):
                texts = [e.text for e in episodes]
                for e in episodes:
                    e.rewards = {"right": e.reward, "rare": 1 / texts.count(e.text)}
                    e.reward = sum(e.rewards.values())
                return episodes
        """)
    )
    env = ENVS.get(f"{path}:Mine")()
    prompt = next(env.prompts())

    async def group() -> list[float]:
        played = [await play(env, prompt, text) for text in ("t", "a", "a")]
        return [e.reward for e in env.score_group([e for _, e in played], prompt)]

    assert asyncio.run(group()) == [2.0, 0.5, 0.5]
    assert check(f"{path}:Mine").findings[-1].text == "score_group returns every sibling"
