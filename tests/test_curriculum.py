"""Prompts that teach nothing rest, come back, and never block the stream."""

from collections.abc import Iterator
from itertools import count, islice

import pytest

from asyncrl.config import CurriculumConfig
from asyncrl.curriculum import Curriculum
from asyncrl.types import Prompt


def epochs(size: int, start: int = 0) -> Iterator[Prompt]:
    for i in count(start):
        yield Prompt(id=i, prompt=f"q{i % size}", metadata={"level": i % 2})


def curriculum(**keys: object) -> Curriculum:
    return Curriculum(CurriculumConfig(**keys), full_marks=1.0)  # type: ignore[arg-type]


def test_nothing_is_skipped_unless_asked_for() -> None:
    off = curriculum()
    for prompt in islice(epochs(4), 4):
        off.feedback(prompt, 1.0)
    assert [p.id for p in islice(off.filter(epochs(4)), 8)] == list(range(8))
    assert off.metrics() == {}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_prompt_that_was_always_or_never_solved_rests_and_comes_back(reward: float) -> None:
    on = curriculum(rest=2)
    on.feedback(next(epochs(2)), reward)  # q0
    assert [p.prompt for p in islice(on.filter(epochs(2)), 5)] == ["q1", "q1", "q0", "q1", "q0"]
    assert on.metrics()["curriculum/skipped"] == 2


def test_ids_stay_positions_so_that_a_resume_finds_its_place() -> None:
    on = curriculum(rest=1)
    on.feedback(next(epochs(3)), 1.0)
    ids = [p.id for p in islice(on.filter(epochs(3)), 4)]
    assert ids == [1, 2, 3, 4]
    assert [p.id for p in islice(on.filter(epochs(3, start=5)), 2)] == [5, 6]


def test_rests_grow_while_the_outcome_repeats_and_end_with_it() -> None:
    on = curriculum(rest=1, max_rest=3)
    prompt = next(epochs(1))
    lengths = []
    for _ in range(4):
        on.feedback(prompt, 0.0)
        lengths.append(next(on.filter(epochs(1))).id)
    assert lengths == [1, 2, 3, 3]
    on.feedback(prompt, 0.5)  # now it teaches something
    assert next(on.filter(epochs(1))).id == 0


def test_kinds_of_prompts_rest_as_one() -> None:
    on = curriculum(rest=3, key="level")
    on.feedback(Prompt(id=0, prompt="any", metadata={"level": 0}), 1.0)
    assert [p.metadata["level"] for p in islice(on.filter(epochs(100)), 4)] == [1, 1, 1, 0]
    assert on.metrics() == {"curriculum/skipped": 3, "curriculum/resting_solved": 0, "curriculum/resting_unsolved": 0}


def test_when_everything_rests_something_is_let_through() -> None:
    on = curriculum(rest=64, max_skips=5)
    for prompt in islice(epochs(3), 3):
        on.feedback(prompt, 0.0)
    assert [p.id for p in islice(on.filter(epochs(3)), 2)] == [5, 11]


def test_a_reward_that_nobody_knows_changes_nothing() -> None:
    on = curriculum(rest=1)
    on.feedback(next(epochs(1)), float("nan"))
    assert next(on.filter(epochs(1))).id == 0
