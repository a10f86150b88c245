"""Supervised training on data of one's own: which columns are learnt from, and which tokens of them."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pytest
from training_helpers import lone_rank

from asyncrl import settings
from asyncrl.chat import Chat
from asyncrl.cli import main
from asyncrl.config import DatasetConfig
from asyncrl.envs.dataset import Dataset
from asyncrl.metrics import read_rows
from asyncrl.scripted import byte_tokenizer
from asyncrl.training.member import Member
from asyncrl.training.sft import Demonstrations
from asyncrl.types import Refusal

SAYS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
PLAIN = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(10)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "cache")


def env_of(folder: Path, *rows: dict[str, Any], style: str = "chat", **keys: Any) -> Dataset:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"prompt_key": "question", "answer_key": "answer", "shuffle": False}
    return Dataset(dataset=DatasetConfig(path=str(path), **{**own, **keys}), style=style)  # type: ignore[arg-type]


def shown(env: Dataset, num: int = 1, start: int = 0) -> list[Any]:
    return list(islice(env.demonstrations(start), num))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "1+1=", "completion": "2"}, [{"role": "user", "content": "1+1="}], "2"),
        ({"question": "1+1=", "completion": 2, "prompt": "no"}, [{"role": "user", "content": "1+1="}], "2"),
        ({"prompt": SAYS[:1], "completion": SAYS[1:]}, SAYS[:1], "hello"),
        ({"messages": SAYS}, SAYS[:1], "hello"),
        ({"prompt": "an extract of the messages", "messages": SAYS}, SAYS[:1], "hello"),
        ({"messages": [{"role": "system", "content": "s"}, *SAYS, *SAYS]},
         [{"role": "system", "content": "s"}, *SAYS, SAYS[0]], "hello"),
        ({"prompt": "go", "completion": [SAYS[1], *SAYS]},
         [{"role": "user", "content": "go"}, SAYS[1], SAYS[0]], "hello"),
    ],
)  # fmt: skip
def test_the_columns_that_other_libraries_name_are_found(
    tmp_path: Path, row: dict[str, Any], prompt: Any, response: str, streaming: bool
) -> None:
    assert shown(env_of(tmp_path, row, streaming=streaming)) == [(prompt, response)]


def test_a_column_of_any_name_and_a_plain_prompt_are_learnt_from(tmp_path: Path) -> None:
    row = {"question": "1+1", "answer": "2", "completion": "3"}
    assert shown(env_of(tmp_path, row, style="plain", completion_key="answer")) == [("1+1", "2")]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, r"no responses to learn from: no column completion or messages.*completion_key.*question, answer\)$"),
        ({"completion_key": "anser"}, r"dataset.completion_key 'anser' is not a column.*did you mean 'answer'\?.*\)$"),
        ({"completion_key": "answer", "prompt_key": "prompt"}, r"dataset.prompt_key 'prompt' is not a .*question, ans"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_line_that_names_the_columns(
    tmp_path: Path, keys: dict[str, Any], said: str, streaming: bool
) -> None:
    env = env_of(tmp_path, {"question": "1+1", "answer": "2"}, streaming=streaming, **keys)
    with pytest.raises(ValueError, match=said) as caught:
        shown(env)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        (PLAIN[0], {"prompt": "1+1", "completion": ""}, "row 2 .*no usable completion: column 'completion' is empty"),
        (PLAIN[0], {"prompt": None, "completion": "2"}, "row 2 .*no usable prompt: column 'prompt' is null"),
        ({"messages": SAYS}, {"messages": SAYS[:1]}, "row 2 .*ends with a message of 'user', not of the assistant"),
        ({"messages": SAYS}, {"messages": SAYS[1:]}, "row 2 .*holds no message before the assistant's"),
        ({"messages": SAYS}, {"messages": None}, "row 2 .*no usable conversation: column 'messages' is null"),
        ({"messages": SAYS}, {"messages": [*SAYS[:1], {"role": "assistant", "content": " "}]}, "an empty message"),
    ],
)
def test_a_row_that_teaches_nothing_is_named_or_left_out(
    tmp_path: Path, good: dict[str, Any], bad: dict[str, Any], said: str, streaming: bool
) -> None:
    with pytest.raises(ValueError, match=said):
        shown(env_of(tmp_path, good, bad, good, streaming=streaming), 3)
    kept = env_of(tmp_path, bad, good, bad, good, streaming=streaming, on_missing="skip", epochs=1)
    assert len(shown(kept, 9)) == 2


def test_it_is_endless_or_as_many_epochs_as_wanted_and_goes_on_anywhere(tmp_path: Path) -> None:
    env = env_of(tmp_path, *PLAIN, shuffle=True)
    whole = shown(env, 25)
    assert shown(env, 10, start=15) == whole[15:]
    assert sorted(map(str, whole[:10])) == sorted(map(str, whole[10:20]))
    assert whole[:10] != whole[10:20]
    twice = msgspec.structs.replace(env, dataset=msgspec.structs.replace(env.dataset, epochs=2))
    assert shown(twice, 99) == whole[:20]


def test_the_template_stands_before_the_response_and_only_the_response_and_its_end_are_trained(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    chat = Chat(tokenizer=tokenizer, system_prompt="be brief")
    env = env_of(tmp_path, {"messages": SAYS})
    ((ids, mask),) = Demonstrations(env, chat, longest=500).take(1)
    asked = [{"role": "system", "content": "be brief"}, *SAYS[:1]]
    before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids[~mask]) == before
    assert tokenizer.decode(ids[mask]) == f"hello{tokenizer.eos_token}"


def test_what_is_too_long_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "x" * (5 if i % 3 else 50)} for i in range(9)]
    chat = Chat(tokenizer=byte_tokenizer())
    some = Demonstrations(env_of(tmp_path, *rows, style="plain", epochs=1), chat, longest=20)
    assert (len(some.take(4)), some.num_too_long) == (4, 2)
    assert (len(some.take(4)), some.num_too_long, some.num_read) == (2, 3, 9)
    assert some.take(4) == []
    with pytest.raises(Refusal, match=r"the last 1000 .* longer than training.seq_len 3: .* shortest has 7 tokens"):
        Demonstrations(env_of(tmp_path, *rows, style="plain"), chat, longest=3).take(1)


def test_a_warm_up_learns_from_ones_own_data_and_ends_with_it(tmp_path: Path) -> None:
    """Sixty times ten demonstrations make four batches of 128 and one of 88."""
    env_of(tmp_path, *PLAIN)
    keys = {"env.name": "dataset", "env.style": "plain", "training.warmup_sft_steps": 9, "dataset.epochs": 60}
    keys |= {"dataset.path": str(tmp_path / "d.jsonl"), "run_dir": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    member = Member(settings.resolve(settings.load(None, keys)), lone_rank())
    assert member.warm_up["sft/steps"] == 5
    assert member.warm_up["sft/loss"] < 4
    member.sender.close()


@pytest.mark.slow
def test_the_command_learns_ones_own_data_and_ends_with_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    env_of(tmp_path, *PLAIN, {"prompt": "long", "completion": "x" * 99})
    run_dir = tmp_path / "run"
    argv = ["--env", "dataset", "--dataset.path", str(tmp_path / "d.jsonl"), "--run-dir", str(run_dir)]
    argv += ["--env.style", "plain", "--dataset.epochs", "8", "--training.batch-size", "8"]
    assert main(["sft", *argv, "--training.learning-rate", "3e-3", "--training.steps", "400"]) == 0
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"] - 1
    assert rows[-1]["sft/too_long"] == 8
    assert (rows[0]["data/epoch"], rows[-1]["data/epoch"]) == (pytest.approx(9 / 11, abs=0.1), 8)
    assert (run_dir / "model" / "config.json").exists()
    assert "demonstrations left out so far: " in capfd.readouterr().out
    argv += ["--run-dir", str(tmp_path / "none"), "--training.seq-len", "3", "--generation.max-tokens", "1"]
    assert main(["sft", *argv]) == 1
    said = capfd.readouterr().out
    assert "ended the run: there is no demonstration to train on: all 88 are longer than training.seq_len" in said
    assert "Traceback" not in said
