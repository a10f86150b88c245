"""Where the answer is in a response: in a box, in tags, after a marker, or the last number. Text in, text or None out.

Rewards and environments call these. They never judge; and they never use a regular expression that can backtrack over
a long response.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d[\d,]*)?")


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands in the last `<tag>...</tag>`; None when there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{...}`, braces balanced; None when there is none."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        inside = _balanced(text, start + len("\\boxed{"))
        if inside is not None:
            return inside.strip()
    return None


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None


def after_marker(text: str, marker: str = "####") -> str | None:
    """The rest of the line after the last `marker` (GSM8K's own format); None when there is none."""
    _, found, rest = text.rpartition(marker)
    lines = rest.strip().splitlines()
    return lines[0].strip() if found and lines else None


def last_number(text: str) -> str | None:
    """The last number of a text, thousands separators removed; None when there is none."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def accepted(target: Any) -> list[str]:
    """The texts that count as the target: of a list any, of a whole number that data made a float (3.0) both forms.

    Raises ValueError for a target with nothing to compare with, which any response would match.
    """
    if isinstance(target, (list, tuple)) and target:
        return [text for one in target for text in accepted(one)]
    if target is None or not str(target).strip() or isinstance(target, (list, tuple)):
        raise ValueError(f"the target is {target!r}: there is nothing to compare a response with")
    whole = isinstance(target, float) and target.is_integer()
    return [str(target), str(int(target))] if whole else [str(target)]


def without_thinking(text: str) -> str:
    """What follows the last `</think>`: the answer proper. A thought that never ended has no answer: empty text."""
    _, closed, rest = text.rpartition("</think>")
    if closed:
        return rest
    return "" if "<think>" in text else text


def find(text: str) -> str | None:
    """The answer by the strongest sign there is: tags, then a box, then `####`."""
    text = without_thinking(text)
    for look in (tagged, boxed, after_marker):
        answer = look(text)
        if answer is not None:
            return answer
    return None


_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_EXPRESSION = 200
_EXPRESSION = re.compile(r"[\d+\-*/() ]+")


def calculate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of `+ - * / ( )` over integers, and the integers in it. Raises ValueError for anything else."""
    if len(expression) > _LONGEST_EXPRESSION or not _EXPRESSION.fullmatch(expression.strip()):
        raise ValueError(f"only integers, + - * / and parentheses, at most {_LONGEST_EXPRESSION} characters")
    try:
        numbers: list[int] = []
        return _value(ast.parse(expression.strip(), mode="eval").body, numbers), numbers
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {type(error).__name__}") from None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    raise ValueError("only integers, + - * / and parentheses are allowed")
