"""What a row of a dataset must hold: a prompt that can be asked, and an answer to compare with or a response to learn
from. `data.py` calls this.

Missing values would be trained in silence otherwise: null as the text "None", an empty answer as one that every
response contains. A table is scanned whole before its first row is used, a stream row by row as it is read.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import DatasetConfig

log = logging.getLogger(__name__)
BATCH = 10_000
KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


class Checked:
    """The rows of one dataset, as they are read: which cannot be used, and that a column keeps to one type."""

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self.num_skipped = 0
        self._kinds: dict[str, tuple[str, str]] = {}
        """Column -> what its first value was, and where that stood."""

    def accepts(self, row: dict[str, Any], where: str) -> bool:
        """Whether to use this row. Raises ValueError for one that cannot be used, unless it may be skipped."""
        problem = self._problem(row, where)
        if problem is None:
            return True
        if self.config.on_missing != "skip":
            raise ValueError(f"dataset {self.config.path!r}: {where} {problem} in {_short(row)}; {_remedy(problem)}")
        self.num_skipped += 1
        return False

    def usable(self, table: Any) -> np.ndarray | None:
        """Indices of the rows to use, ascending, or None for all. Raises ValueError as `accepts` does."""
        bad = sorted({i for column, what in _columns(self.config) for i in self._bad(table, column, what)})
        if not bad:
            return None
        first, where = table[bad[0]], f"row {bad[0] + 1}"
        if self.config.on_missing != "skip":
            problem = self._problem(first, where)
            more = f" ({len(bad)} of {len(table)} rows cannot be used)" if len(bad) > 1 else ""
            raise ValueError(f"dataset {self.config.path!r}: {where} {problem}{more}; {_remedy(problem)}")
        log.warning(
            "dataset %r: %d of %d rows skipped: %s %s",
            self.config.path,
            len(bad),
            len(table),
            where,
            self._problem(first, where),
        )
        return np.setdiff1d(np.arange(len(table)), bad)

    def _problem(self, row: dict[str, Any], where: str) -> str | None:
        for column, what in _columns(self.config):
            problem = _PROBLEMS[what](row[column])
            if problem is not None:
                return f"has no usable {what}: column {column!r} {problem}"
            self.one_kind(column, row[column], where)
        return None

    def one_kind(self, column: str, value: Any, where: str) -> None:
        """Raise ValueError when an earlier value of this column was of another type."""
        kind = KINDS.get(type(value), type(value).__name__)
        known, at = self._kinds.setdefault(column, (kind, where))
        if kind != known:
            raise ValueError(
                f"dataset {self.config.path!r}: column {column!r} is {known} in {at} and {kind} in {where}; write "
                "one type in all rows"
            )

    def _bad(self, table: Any, column: str, what: str) -> Iterator[int]:
        """Rows that lack this column: found by Arrow where it holds text or numbers, value by value elsewhere."""
        import datasets

        start, feature, values = 0, table.features[column], table.select_columns([column])
        if "Json" in str(feature):  # as it is stored, it is text of another text
            batches = (batch[column] for batch in values.iter(BATCH))
        else:
            batches = (batch.column(0) for batch in values.with_format("arrow").iter(BATCH))
        for batch in batches:
            if isinstance(feature, datasets.Value):
                yield from (start + int(i) for i in np.flatnonzero(_missing(batch)))
            else:
                yield from self._bad_values(
                    column, what, start, batch if isinstance(batch, list) else batch.to_pylist()
                )
            start += len(batch)

    def _bad_values(self, column: str, what: str, start: int, values: list[Any]) -> Iterator[int]:
        for index, value in enumerate(values, start):
            if _PROBLEMS[what](value) is not None:
                yield index
            else:
                self.one_kind(column, value, f"row {index + 1}")


def _short(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _columns(config: DatasetConfig) -> list[tuple[str, str]]:
    """(column, what it holds) of what must be there."""
    asked = [
        (config.prompt_key, "prompt"),
        (None if config.on_missing == "keep" else config.answer_key, "answer"),
        (config.completion_key, "completion" if config.prompt_key else "conversation"),
    ]
    return [(column, what) for column, what in asked if column]


def _missing(array: Any) -> np.ndarray:
    """Which values of an Arrow column of text or numbers are null, NaN or blank."""
    import pyarrow
    import pyarrow.compute as pc

    found = pc.is_null(array, nan_is_null=True)
    if pyarrow.types.is_string(array.type) or pyarrow.types.is_large_string(array.type):
        found = pc.or_(found, pc.fill_null(pc.equal(pc.utf8_trim_whitespace(array), ""), True))
    return found.to_numpy()


def prompt_problem(value: Any) -> str | None:
    """Why this cannot be asked; None when it can: text, a number, or a list of chat messages."""
    if not isinstance(value, list) or not value:
        return answer_problem(value)
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            return f"is a list, but message {number} is no object with role and content"
        for key in ("role", "content"):
            text = message.get(key)
            if text is None:
                has = ", ".join(str(k) for k in message if message[k] is not None)
                return f"has no {key!r} in message {number} (it has {has or 'nothing'})"
            if not isinstance(text, str):
                return f"holds {KINDS.get(type(text), 'no text')} as {key!r} of message {number}, which must be text"
    return None if value[-1]["content"].strip() else "ends with an empty message"


def answer_problem(value: Any) -> str | None:
    """Why nothing can be compared with this; None when something can."""
    if value is None:
        return "is null or missing"
    if isinstance(value, float) and math.isnan(value):
        return "is NaN"
    if isinstance(value, str) and not value.strip():
        return "is empty"
    if isinstance(value, list):
        return "is an empty list" if not value else next(filter(None, map(answer_problem, value)), None)
    return None


def completion_problem(value: Any) -> str | None:
    """Why nothing can be learnt from this; None when something can: text, a number, or messages up to a reply."""
    problem = prompt_problem(value)
    if problem is not None or not isinstance(value, list) or value[-1]["role"] == "assistant":
        return problem
    return f"ends with a message of {value[-1]['role']!r}, not of the assistant"


def is_conversation(value: Any) -> bool:
    """Chat messages that begin before the assistant's: no prompt is needed beside them."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and value[0].get("role") != "assistant"
    )


def conversation_problem(value: Any) -> str | None:
    """Why this cannot be learnt from without a prompt beside it; None when it can: messages that end with a reply."""
    problem = completion_problem(value)
    if problem is not None:
        return problem
    if not isinstance(value, list):
        return f"is {KINDS.get(type(value), 'no list')}, not a list of chat messages"
    return None if len(value) > 1 else "holds no message before the assistant's"


_PROBLEMS = {
    "prompt": prompt_problem,
    "answer": answer_problem,
    "completion": completion_problem,
    "conversation": conversation_problem,
}


def _remedy(problem: str | None) -> str:
    keep = ", or to keep for a reward of your own" if (problem or "").startswith("has no usable answer") else ""
    return f"fix it, or set dataset.on_missing to skip{keep}"


def refuse_mixed(config: DatasetConfig, path: Path, features: Any) -> None:
    """Raise ValueError for a JSON file with a column of several types, which the library turns into one: "1" to 1."""
    import datasets

    used = [column for column in (config.prompt_key, config.answer_key, config.completion_key) if column]
    columns = [column for column in used if isinstance((features or {}).get(column), datasets.Json)]
    checked = Checked(config)
    for number, row in enumerate(_parsed(path) if columns else (), 1):
        for column in columns:
            if row.get(column) is not None:
                checked.one_kind(column, row[column], f"row {number}")


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    if _is_array(path):
        yield from json.loads(path.read_bytes())
        return
    with path.open("rb") as file:
        yield from (json.loads(line) for line in file if line.strip())


def _is_array(path: Path) -> bool:
    """A .json file with all rows in one list, instead of one in each line."""
    with path.open("rb") as file:
        return path.suffix == ".json" and file.read(1024).lstrip()[:1] == b"["


def json_error(path: Path) -> str | None:
    """Where a JSON or JSON lines file cannot be read, and why; None when that is not what is wrong with it."""
    if _is_array(path):
        return _parse_error(path.read_bytes())
    with path.open("rb") as file:
        for number, line in enumerate((line.strip() for line in file if line.strip()), 1):
            if error := _parse_error(line):
                return f"row {number} is no JSON: {error}"
    return None


def _parse_error(text: bytes) -> str | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 ({error.reason} at byte {error.start + 1})"
    return None


def is_blank(path: Path) -> bool:
    """A file with nothing in it, or white space alone."""
    with path.open("rb") as file:
        return not any(line.strip() for line in file)
