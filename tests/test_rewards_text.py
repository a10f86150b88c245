"""Rewards on text: where the answer is, what counts as equal, and the form of a thought."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.env import Score
from asyncrl.rewards import MathReward, RegexMatch, ThinkingReward, Weighted, reward_from
from asyncrl.rewards.answers import boxed, calculate, find, last_number, tagged
from asyncrl.rewards.math import equal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}} then \boxed{x", r"\frac{1}{2}"),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("steps\n#### 1,234\n", "1,234"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>never closed \boxed{1}", None),
        ("nothing", None),
        ("</answer><answer>", None),
    ],
)
def test_the_answer_is_found_where_it_is_marked(text: str, answer: str | None) -> None:
    assert find(text) == answer


def test_unfinished_marks_are_no_answers() -> None:
    assert boxed(r"\boxed{1") is None
    assert tagged("<answer>1") is None
    assert last_number("in 1,200 or -3.5 cases") == "-3.5"


@given(st.text(max_size=200))
def test_no_text_breaks_the_search_for_an_answer(text: str) -> None:
    find(text)
    last_number(text)


@given(st.text(alphabet="0123456789+-*/() .^abc_", max_size=30))
def test_calculate_gives_a_value_or_a_value_error(text: str) -> None:
    try:
        value, numbers = calculate(text)
    except ValueError:
        return
    assert value == value
    assert numbers


@pytest.mark.parametrize("bad", ["__import__('os')", "2**9", "1/0", "1.5", "", "9" * 300, "(1"])
def test_calculate_refuses_what_is_not_arithmetic(bad: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(bad)


@pytest.mark.parametrize(
    ("answer", "target", "same"),
    [
        ("1,234", "1234", True),
        ("$5.", "5", True),
        ("50%", "50", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1/3", r"\frac{1}{3}", True),
        ("x+1", "1+x", True),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
        ("6", "7", False),
        ("x", "y", False),
        ("", "7", False),
        (r"\frac{", "1", False),
        ("1e999999999", "1", False),
    ],
)
def test_equal_means_mathematically(answer: str, target: str, same: bool) -> None:
    assert equal(answer, target) is same


def test_tolerance_is_relative_and_off_by_default() -> None:
    assert not equal("3.14", "3.1416")
    assert equal("3.14", "3.1416", tolerance=1e-3)


def test_a_wrong_answer_in_the_right_format_earns_partial_credit() -> None:
    reward = MathReward(format_reward=0.1)
    assert reward("", r"\boxed{1}", "2") == {"correct": 0.0, "format": 0.1}
    assert reward("", r"\boxed{2}", "2") == {"correct": 1.0, "format": 0.0}
    assert reward("", "2", "2") == {"correct": 0.0, "format": 0.0}
    assert MathReward(last_number=True)("", "it is 2", "2") == {"correct": 1.0}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think>b", 1.0),
        ("<think></think>b", 0.75),
        ("<think>a</think>", 0.75),
        ("<think>a", 0.25),
        ("a</think>b", 0.0),
        ("<think>a</think>b<think>c</think>", 0.0),
        ("b", 0.0),
    ],
)
def test_a_thought_is_scored_by_its_form(response: str, score: float) -> None:
    assert ThinkingReward()("", response, None) == score


def test_a_template_may_open_the_thought() -> None:
    assert ThinkingReward(opened=True)("", "a</think>b", None) == 1.0


def test_a_regular_expression_compares_its_group_with_the_target() -> None:
    assert RegexMatch(pattern=r"result: (\d+)")("", "result: 1\nresult: 2", "2") == 1.0
    assert RegexMatch(pattern=r"\d")("", "none", None) == 0.0
    with pytest.raises(ValueError, match="not a regular expression"):
        RegexMatch(pattern="(")


def test_named_rewards_are_weighted_and_add_up() -> None:
    reward = reward_from({"math": 1.0, "thinking": 0.2})
    assert reward("", r"<think>a</think>\boxed{2}", "2") == {"math": 1.0, "thinking": 0.2}


def test_async_parts_are_awaited_together() -> None:
    async def slow(prompt: str, response: str, target: Any) -> float:
        await asyncio.sleep(0)
        return 0.5

    async def run() -> Score:
        score: Any = Weighted({"slow": (slow, 2.0), "fast": (lambda *_: 1, 1.0)})("", "", None)
        return await score

    assert asyncio.run(run()) == {"slow": 1.0, "fast": 1.0}


def test_a_part_that_gives_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="finite"):
        Weighted({"bad": (lambda *_: float("nan"), 1.0)})("", "", None)


@pytest.mark.parametrize("bad", ["maths", "no_such_module:f", "json:no_such_function"])
def test_an_unknown_reward_is_refused_by_name(bad: str) -> None:
    with pytest.raises(ValueError, match=r"no_such|maths"):
        reward_from(bad)


@pytest.mark.parametrize("reward", ["exact", "contains", "math", "regex:(.+)"])
def test_any_of_a_list_is_the_answer_and_nothing_is_none(reward: str) -> None:
    score = reward_from(reward)

    def full(response: str, target: Any) -> bool:
        given = score("", response, target)
        return (given if isinstance(given, float) else given["correct"]) == 1.0  # type: ignore[index]

    right = r"\boxed{3}" if reward == "math" else "3"
    assert full(right, ["2", "3"])
    assert not full(right, ["2", "4"])
    assert full(right, 3.0)
    for nothing in (None, "", " ", [], ["3", None]):
        with pytest.raises(ValueError, match="nothing to compare"):
            full("None", nothing)
