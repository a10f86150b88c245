"""The demo's environment: exact rewards, a stream that resumes, demonstrations that give nothing away."""

from itertools import islice

import pytest

from asyncrl.envs.sort_digits import SortDigits
from asyncrl.registry import ENVS


def test_the_demo_environment_is_found_by_name() -> None:
    assert ENVS.get("sort_digits") is SortDigits


def test_a_prompt_asks_to_sort_and_its_target_is_sorted() -> None:
    prompt = next(SortDigits(seed=3).prompts())
    digits = prompt.prompt.removeprefix("sort ").removesuffix("=")
    assert len(digits) == 5
    assert prompt.target == "".join(sorted(digits))


def test_only_the_sorted_digits_score() -> None:
    env = SortDigits()
    for prompt in islice(env.prompts(), 20):
        assert env.score(env.reference(prompt), prompt) == 1.0
        assert env.score(env.reference(prompt) + "0", prompt) == 0.0
        assert env.score("", prompt) == 0.0


def test_prompts_resume_at_any_position_with_the_same_content() -> None:
    whole = list(islice(SortDigits(seed=1).prompts(), 30))
    assert list(islice(SortDigits(seed=1).prompts(17), 13)) == whole[17:]
    assert [p.id for p in whole] == list(range(30))
    assert list(islice(SortDigits(seed=2).prompts(), 30)) != whole


def test_demonstrations_teach_the_format_and_not_the_order() -> None:
    shown = list(islice(SortDigits().demonstrations(), 2000))
    assert shown[500:510] == list(islice(SortDigits().demonstrations(500), 10))
    digits = [prompt.removeprefix("sort ").removesuffix("=") for prompt, _ in shown]
    assert all(sorted(d) == sorted(response) for d, (_, response) in zip(digits, shown, strict=True))
    right = sum(response == "".join(sorted(response)) for _, response in shown) / len(shown)
    assert right < 0.03


def test_zero_digits_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SortDigits(digits=0)
