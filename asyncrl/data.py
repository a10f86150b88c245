"""Rows of a dataset in an order that the seed fixes, from any position: the hub, folders, JSON lines, Parquet, CSV.

Environments that read data call `rows`; `settings.resolve` calls `with_dataset`. Everything goes through the Hugging
Face `datasets` library, which is imported when the first row is asked for and not before. What cannot be read is a
ValueError of one line.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncrl.config import DatasetConfig
from asyncrl.data_check import Checked, is_blank, is_conversation, json_error, refuse_mixed
from asyncrl.env import Env, has_demonstrations

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
log = logging.getLogger(__name__)
OWN_CHOICE = ("path", "name", "split", "eval_split", "prompt_key", "answer_key", "completion_key")
"""Keys that an environment has an opinion on: none in the configuration leaves its own."""
COMPLETIONS = ("completion", "messages")
"""Columns of responses to learn from, where dataset.completion_key names none."""
PEEK = 100
"""Rows that say whether responses are whole conversations."""


class Row(NamedTuple):
    """One row at one position of the stream; positions go on from epoch to epoch."""

    position: int
    prompt: Any
    answer: Any
    completion: Any = None


def with_dataset(env: Env, given: DatasetConfig) -> Env:
    """The environment with the configuration's `dataset` section on top of its own defaults.

    An environment reads a dataset when it has a field `dataset` of type DatasetConfig. Raises ValueError when it has
    none and the section says anything.
    """
    own = dataset_of(env)
    if own is None:
        parts = {name: part for name in env.__struct_fields__ if dataset_of(part := getattr(env, name)) is not None}
        _refuse_changes(given, env, parts)
        return msgspec.structs.replace(env, **{name: _completed(part) for name, part in parts.items()})
    if given.completion_key is not None and not has_demonstrations(env):
        raise ValueError(
            f"dataset.completion_key has no effect: environment {type(env).__name__} has no demonstrations"
        )
    return msgspec.structs.replace(env, dataset=_merged(own, given))


def _refuse_changes(given: DatasetConfig, env: Env, parts: Iterable[str]) -> None:
    changed = [k for k in DatasetConfig.__struct_fields__ if getattr(given, k) != getattr(DatasetConfig(), k)]
    if changed:
        hint = "".join(f"; its part does: env.{name}.dataset.{changed[0]}" for name in [*parts][:1])
        name = type(env).__name__
        raise ValueError(f"dataset.{changed[0]} has no effect: environment {name} reads no dataset itself{hint}")


def _completed(part: Env) -> Env:
    """A part of a mixture: what its section of the configuration leaves open is as it would be alone."""
    own, given = dataset_of(type(part)()), dataset_of(part)
    assert own is not None
    assert given is not None
    return msgspec.structs.replace(part, dataset=_merged(own, given))


def dataset_of(env: object) -> DatasetConfig | None:
    """What an environment reads; None when it reads no dataset (a part of a mixture may be called so)."""
    own = getattr(env, "dataset", None)
    return own if isinstance(own, DatasetConfig) else None


def _merged(own: DatasetConfig, given: DatasetConfig) -> DatasetConfig:
    kept = {key: getattr(own, key) for key in OWN_CHOICE if getattr(given, key) is None}
    if given.path is not None and given.path != own.path:
        kept.pop("name", None)  # the name of a configuration belongs to the path it was written for
    return msgspec.structs.replace(given, **kept)


def for_evaluation(config: DatasetConfig) -> DatasetConfig:
    """The same data, the evaluation split, each row once. A single file has one split, `train`, and parts of it."""
    single = config.path is not None and Path(config.path).suffix in FORMATS
    split = config.eval_split
    if split is None or (single and not split.startswith("train")):
        split = config.split
    return msgspec.structs.replace(config, split=split, epochs=1)


def for_demonstrations(config: DatasetConfig, *, prompt_keys: Sequence[str]) -> DatasetConfig:
    """The same data as responses to learn from: `completion_key` set, and `prompt_key` where they are no whole
    conversations, to the first of `prompt_keys` that is a column. Reads the first rows. Raises ValueError."""
    asked = msgspec.structs.replace(config, prompt_key=None, answer_key=None)
    first = list(islice(_readable(asked, _open(asked)), PEEK))
    if not first:
        raise ValueError(_no_rows(config))
    columns = list(first[0])
    key = config.completion_key or next((name for name in COMPLETIONS if name in columns), None)
    if key is None:
        raise ValueError(
            f"dataset {config.path!r} has no responses to learn from: no column {' or '.join(COMPLETIONS)}, and "
            f"dataset.completion_key names no other (columns: {', '.join(columns)})"
        )
    asked = msgspec.structs.replace(asked, completion_key=key)
    _require_columns(asked, columns)
    if any(is_conversation(row[key]) for row in first):
        return asked
    prompt = next((name for name in prompt_keys if name in columns), prompt_keys[0])
    asked = msgspec.structs.replace(asked, prompt_key=prompt)
    _require_columns(asked, columns)
    return asked


def rows(config: DatasetConfig, *, seed: int, start: int = 0) -> Iterator[Row]:
    """Yield rows from position `start`: the same rows as without `start`, also in a stream. Raises ValueError.

    A stream is read again up to `start`, since what a shuffle buffer holds cannot be known otherwise. A row without a
    prompt or an answer is refused, or has no position, as `dataset.on_missing` says.
    """
    read = _stream_rows if config.streaming else _table_rows
    for position, row in read(config, _open(config), seed, start):
        used = (config.prompt_key, config.answer_key, config.completion_key)
        yield Row(position, *(row[key] if key else None for key in used))


def _table_rows(config: DatasetConfig, table: Any, seed: int, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
    table = _limited(config, table)
    usable = _usable(config, table)
    size = len(table) if usable is None else len(usable)
    if not size:
        raise ValueError(_no_rows(config, skipped=len(table)))
    for epoch in _epochs(config, start // size):
        order = np.random.default_rng((abs(seed), epoch)).permutation(size) if config.shuffle else np.arange(size)
        order = order if usable is None else usable[order]
        first = max(0, start - epoch * size)
        for offset in range(first, size):
            yield epoch * size + offset, table[int(order[offset])]


def num_rows(config: DatasetConfig) -> int | None:
    """How many rows one epoch has; None for a stream. Raises ValueError for what cannot be read."""
    if config.streaming:
        return None
    table = _limited(config, _open(config))
    usable = _usable(config, table) if config.on_missing == "skip" else None
    return len(table) if usable is None else len(usable)


def _limited(config: DatasetConfig, table: Any) -> Any:
    _require_columns(config, table.column_names)
    return table if config.limit is None else table.select(range(min(config.limit, len(table))))


def _usable(config: DatasetConfig, table: Any) -> np.ndarray | None:
    from pyarrow import ArrowInvalid  # it comes with datasets

    try:
        return Checked(config).usable(table)
    except ArrowInvalid as error:  # text that is no UTF-8 is found as it is read
        raise ValueError(_unreadable(config, error)) from error


def _stream_rows(config: DatasetConfig, stream: Any, seed: int, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
    if config.limit is not None:
        stream = stream.take(config.limit)
    if config.shuffle:
        stream = stream.shuffle(seed=abs(seed), buffer_size=config.shuffle_buffer)
    position, checked = 0, Checked(config)
    for epoch in _epochs(config, 0):
        stream.set_epoch(epoch)
        before = position
        for number, row in enumerate(_readable(config, stream), 1):
            if position == 0:
                _require_columns(config, list(row))
            if not checked.accepts(row, f"row {number} of the stream"):
                continue
            if position >= start:
                yield position, row
            position += 1
        if position == before:
            raise ValueError(_no_rows(config, skipped=checked.num_skipped))
        if epoch == 0 and checked.num_skipped:
            log.warning("dataset %r: %d rows of the stream skipped", config.path, checked.num_skipped)


def _readable(config: DatasetConfig, stream: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a stream, which is opened and parsed only as it is read."""
    rows_ = iter(stream)
    while True:
        try:
            row = next(rows_)
        except StopIteration:
            return
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(_unreadable(config, error)) from error
        yield row


def _no_rows(config: DatasetConfig, *, skipped: int = 0) -> str:
    but = f" with a prompt and an answer: {skipped} were skipped" if skipped else ""
    return f"dataset {config.path!r} has no rows in split {config.split or 'train'!r}{but}"


def _epochs(config: DatasetConfig, first: int) -> Iterator[int]:
    return iter(count(first)) if config.epochs is None else iter(range(first, config.epochs))


def _open(config: DatasetConfig) -> Any:
    """A Dataset or an IterableDataset."""
    if config.path is None:
        raise ValueError("dataset.path is not set: give a hub name, a folder, or a .jsonl, .parquet or .csv file")
    import datasets

    datasets.disable_progress_bars()  # a complaint is one line, and logs are for what happened
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises
    path = Path(config.path).expanduser()
    single = path.suffix in FORMATS
    if path.is_file() and not single:  # the library would look for it on the hub
        raise ValueError(
            f"dataset.path {config.path!r}: expected a file named {', '.join(FORMATS)}; unpack or rename it"
        )
    if single and path.is_file() and is_blank(path):
        raise ValueError(_no_rows(config))
    try:
        opened = _load_file(config, path) if single else _load(config, path)
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(_unreadable(config, error)) from error
    if single and FORMATS[path.suffix] == "json":
        refuse_mixed(config, path, opened.features)
    return opened


def _load_file(config: DatasetConfig, path: Path) -> Any:
    from datasets import load_dataset

    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    files, split = {"train": str(path)}, config.split or "train"
    return load_dataset(FORMATS[path.suffix], data_files=files, split=split, streaming=config.streaming)


def _load(config: DatasetConfig, path: Path) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    split = config.split or "train"
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        saved = load_from_disk(str(path))
        table = saved[split] if isinstance(saved, DatasetDict) else saved
        return table.to_iterable_dataset() if config.streaming else table
    return load_dataset(str(path), config.name, split=split, streaming=config.streaming)


def _unreadable(config: DatasetConfig, error: Exception) -> str:
    """One line for what the library raised: its reason lies in the last of a chain of causes."""
    path = Path(config.path or "").expanduser()
    if path.is_file() and FORMATS.get(path.suffix) == "json" and (where := json_error(path)):
        return f"dataset.path {config.path!r}: {where}"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, StopIteration) or "corresponds to no data" in str(cause):  # how it says that nothing is there
        return _no_rows(config)
    return f"dataset.path {config.path!r}: {_one_line(cause)}"


def _require_columns(config: DatasetConfig, columns: list[str]) -> None:
    for key in ("prompt_key", "answer_key", "completion_key"):
        wanted = getattr(config, key)
        if wanted is not None and wanted not in columns:
            near = difflib.get_close_matches(wanted, columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"dataset.{key} {wanted!r} is not a column of {config.path}{hint} (columns: {', '.join(columns)})"
            )


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
