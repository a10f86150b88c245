"""Datasets: any format, a fixed order, exact resume, and one line when a key is wrong."""

import csv
import json
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pytest

from asyncrl import settings
from asyncrl.config import DatasetConfig
from asyncrl.data import for_evaluation, rows
from asyncrl.envs.dataset import Dataset
from asyncrl.envs.gsm8k import GSM8K
from asyncrl.envs.math import Math

ROWS = [{"question": f"What is {i} + 1?", "answer": f"We add.\n#### {i + 1}"} for i in range(20)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "cache")


def write(path: Path, rows_: list[dict[str, Any]] = ROWS) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows_))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows_[0]))
            writer.writeheader()
            writer.writerows(rows_)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows_).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows_).save_to_disk(path)
    return path


def config(path: Path, **keys: Any) -> DatasetConfig:
    return DatasetConfig(path=str(path), split="train", prompt_key="question", answer_key="answer", **keys)


def take(config_: DatasetConfig, num: int, *, start: int = 0, seed: int = 0) -> list[tuple[int, str]]:
    return [(r.position, r.prompt) for r in islice(rows(config_, seed=seed, start=start), num)]


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.parquet", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, streaming: bool) -> None:
    read = take(config(write(tmp_path / name), shuffle=False, streaming=streaming), 20)
    assert read == [(i, r["question"]) for i, r in enumerate(ROWS)]


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    write(tmp_path / "test.jsonl", ROWS[:3])
    held_out = for_evaluation(config(tmp_path, eval_split="test", shuffle=False))
    assert len(take(held_out, 100)) == 3


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("start", [0, 1, 19, 20, 33, 60])
def test_resuming_gives_what_an_uninterrupted_run_would_have_seen(tmp_path: Path, streaming: bool, start: int) -> None:
    what = config(write(tmp_path / "d.jsonl"), streaming=streaming, shuffle_buffer=7)
    whole = take(what, 70, seed=5)
    assert take(what, 10, start=start, seed=5) == whole[start : start + 10]
    assert [position for position, _ in whole] == list(range(70))


@pytest.mark.parametrize("streaming", [False, True])
def test_each_epoch_has_every_row_in_another_order(tmp_path: Path, streaming: bool) -> None:
    what = config(write(tmp_path / "d.jsonl"), streaming=streaming, epochs=2)
    read = [prompt for _, prompt in take(what, 1000)]
    first, second = read[:20], read[20:]
    assert sorted(first) == sorted(second) == sorted(r["question"] for r in ROWS)
    assert first != second
    assert first != [prompt for _, prompt in take(what, 20, seed=1)]


def test_a_limit_keeps_the_first_rows(tmp_path: Path) -> None:
    what = config(write(tmp_path / "d.jsonl"), limit=4, epochs=1)
    assert sorted(p for _, p in take(what, 100)) == [r["question"] for r in ROWS[:4]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_key_lists_the_columns_in_one_line(tmp_path: Path, streaming: bool) -> None:
    path = write(tmp_path / "d.jsonl")
    env = Dataset(dataset=msgspec.structs.replace(config(path, streaming=streaming), prompt_key="questoin"))
    with pytest.raises(ValueError, match=r"did you mean 'question'\? \(columns: question, answer\)$") as caught:
        env.check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["nowhere.jsonl", "no/such/folder"])
def test_data_that_is_not_there_is_one_line(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"dataset\.path") as caught:
        take(config(tmp_path / path), 1)
    assert "\n" not in str(caught.value)


def test_an_unknown_split_names_the_splits_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(ValueError, match=r"valid.*train"):
        take(msgspec.structs.replace(config(path), split="valid"), 1)


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("question,answer\n")
    with pytest.raises(ValueError, match=r"no rows|no data"):
        take(config(tmp_path / "d.csv"), 1)


def test_the_dataset_section_goes_to_the_environment(tmp_path: Path) -> None:
    path = str(write(tmp_path / "d.jsonl"))
    run = settings.resolve(
        settings.load(None, {"env.name": "gsm8k", "dataset.path": path, "dataset.streaming": "true"})
    )
    assert isinstance(run.env, GSM8K)
    assert run.env.dataset == run.config.dataset
    assert (run.env.dataset.path, run.env.dataset.name, run.env.dataset.prompt_key) == (path, None, "question")
    run.env.check()


@pytest.mark.parametrize(("name", "prompt_key"), [("dataset", "question"), ("math", "problem")])
def test_what_the_env_section_leaves_out_is_the_environments_own_choice(name: str, prompt_key: str) -> None:
    keys = {"env.name": name, "env.dataset.path": "mine.jsonl", "env.dataset.limit": "3"}
    run = settings.resolve(settings.load(None, keys))
    assert run.config.dataset.prompt_key == prompt_key
    assert (run.config.dataset.path, run.config.dataset.name, run.config.dataset.limit) == ("mine.jsonl", None, 3)


def test_a_dataset_for_an_environment_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dataset\.path has no effect"):
        settings.resolve(settings.load(None, {"env.name": "countdown", "dataset.path": "x"}))


def test_gsm8k_takes_the_number_after_the_marks(tmp_path: Path) -> None:
    env = GSM8K(dataset=config(write(tmp_path / "d.jsonl")))
    prompt = next(env.prompts())
    assert env.score(env.reference(prompt), prompt) == {"correct": 1.0}
    assert env.score(f"I think \\boxed{{{prompt.target}}}", prompt) == {"correct": 1.0}
    assert env.score("#### -1", prompt) == {"correct": 0.0}


def test_math_takes_the_box_of_the_solution(tmp_path: Path) -> None:
    problem = [{"problem": "Halve 1.", "solution": r"It is $\boxed{\frac{1}{2}}$."}]
    keys = DatasetConfig(path=str(write(tmp_path / "d.jsonl", problem)), prompt_key="problem", answer_key="solution")
    prompt = next(Math(dataset=keys).prompts())
    assert prompt.target == r"\frac{1}{2}"
    assert Math().score(r"\boxed{0.5}", prompt) == {"correct": 1.0}


def test_chat_columns_are_messages(tmp_path: Path) -> None:
    talk = [{"question": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": "a"}]
    env = Dataset(dataset=config(write(tmp_path / "d.jsonl", talk)))
    assert next(env.prompts()).prompt == talk[0]["question"]


def test_a_template_surrounds_text_prompts(tmp_path: Path) -> None:
    env = Dataset(dataset=config(write(tmp_path / "d.jsonl"), shuffle=False), template="Q: {prompt} A:", style="plain")
    assert next(env.prompts()).prompt == "Q: What is 0 + 1? A:"


@pytest.mark.parametrize(
    ("keys", "size"),
    [({}, 20), ({"limit": 7}, 7), ({"limit": 99, "epochs": 3}, 20), ({"streaming": True}, None)],
)
def test_an_environment_on_data_knows_how_many_prompts_an_epoch_has(
    tmp_path: Path, keys: dict[str, Any], size: int | None
) -> None:
    what = config(write(tmp_path / "d.jsonl"), **keys)
    assert [env(dataset=what).epoch_prompts() for env in (Dataset, GSM8K, Math)] == [size] * 3
    taught = msgspec.structs.replace(what, completion_key="answer")
    assert Dataset(dataset=taught).epoch_demonstrations() == size


def test_rows_that_are_left_out_are_no_part_of_an_epoch(tmp_path: Path) -> None:
    rows_ = [{"q": str(i) if i % 3 else None, "a": "1" if i % 2 else None} for i in range(12)]
    what = msgspec.structs.replace(lines(tmp_path / "d.jsonl", *rows_), on_missing="skip")
    env = Dataset(dataset=msgspec.structs.replace(what, completion_key="q", prompt_key="q"))
    assert (env.epoch_prompts(), env.epoch_demonstrations()) == (4, 8)
    assert len(list(env.prompts())) == 4


def lines(path: Path, *rows_: Any) -> DatasetConfig:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows_))
    return DatasetConfig(path=str(path), prompt_key="q", answer_key="a", shuffle=False, epochs=1)


GOOD = {"q": "1+1", "a": "2"}
TALK = {"q": [{"role": "user", "content": "1+1"}], "a": "2"}


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        (GOOD, {"q": None, "a": "1"}, r"row 3 .*has no usable prompt: column 'q' is null"),
        (GOOD, {"a": "1"}, r"row 3 .*has no usable prompt: column 'q' is null or missing"),
        (GOOD, {"q": " ", "a": "1"}, r"row 3 .*has no usable prompt: column 'q' is empty"),
        (GOOD, {"q": "2", "a": None}, r"row 3 .*has no usable answer: column 'a' is null"),
        (GOOD, {"q": "2", "a": ""}, r"row 3 .*has no usable answer: column 'a' is empty"),
        ({"q": "1", "a": ["2"]}, {"q": "2", "a": []}, r"row 3 .*column 'a' is an empty list"),
        ({"q": "1", "a": 2.5}, {"q": "2", "a": None}, r"row 3 .*column 'a' is null"),
        (GOOD, {"q": "2", "a": 4}, r"column 'a' is text in row 1 and a number in row 3"),
        (TALK, {"q": [{"rol": "user", "content": "2"}], "a": "2"}, r"row 3 .*no 'role' in message 1 \(it has .*rol"),
        (
            TALK,
            {"q": [{"role": "user", "content": None}], "a": "2"},
            r"row 3 .*no 'content' in message 1 \(it has role",
        ),
        (TALK, {"q": [], "a": "2"}, r"row 3 .*column 'q' is an empty list"),
        (GOOD, '{"q": "2", "a', r"row 3 is no JSON: Unterminated string starting at column 12"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, good: dict[str, Any], bad: Any, complaint: str, streaming: bool
) -> None:
    what = msgspec.structs.replace(lines(tmp_path / "d.jsonl", good, good, bad, good), streaming=streaming)
    with pytest.raises(ValueError, match=complaint) as caught:
        list(rows(what, seed=0))
    assert "d.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_read_by_nothing_here_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    for name in ("d.txt", "d.jsonl.gz"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(ValueError, match=rf"{name}': expected a file named .jsonl, .json, .parquet, .csv"):
            take(config(tmp_path / name), 1)


@pytest.mark.parametrize("streaming", [False, True])
def test_text_that_is_not_utf_8_is_named_with_its_row(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"d.jsonl': row 2 .*not UTF-8"):
        take(msgspec.structs.replace(config(path), streaming=streaming), 2)


@pytest.mark.parametrize("text", ["", "\n \n"])
@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.parquet"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}' has no rows"):
        take(config(tmp_path / name), 1)


@pytest.mark.parametrize("streaming", [False, True])
def test_skipped_rows_have_no_position_and_are_counted(tmp_path: Path, streaming: bool, caplog: Any) -> None:
    given = [{"q": str(i) if i % 3 else None, "a": "1"} for i in range(10)]
    what = msgspec.structs.replace(
        lines(tmp_path / "d.jsonl", *given), streaming=streaming, on_missing="skip", epochs=None, shuffle=True
    )
    whole = take(what, 18)
    assert [position for position, _ in whole] == list(range(18))
    assert sorted(q for _, q in whole[:6]) == ["1", "2", "4", "5", "7", "8"]
    assert take(what, 9, start=7) == whole[7:16]
    assert " 4 " in caplog.messages[0]


def test_an_answer_may_be_left_to_a_reward_of_ones_own(tmp_path: Path) -> None:
    what = msgspec.structs.replace(lines(tmp_path / "d.jsonl", GOOD, {"q": "2", "a": None}), on_missing="keep")
    assert [row.answer for row in rows(what, seed=0)] == ["2", None]
    what = msgspec.structs.replace(lines(tmp_path / "e.jsonl", GOOD, {"q": None, "a": "2"}), on_missing="keep")
    with pytest.raises(ValueError, match="row 2 has no usable prompt"):
        list(rows(what, seed=0))
