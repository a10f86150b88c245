"""The journal's SQLite database: its tables, its format, one transaction, and what a full disk is called.

Used by `journal.py` alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMAT = 3
"""Kept as the database's `user_version`. Before 3 digests of groups in files were others, and `meta` alone said it."""
_TABLES = """
create table if not exists meta (id integer primary key check (id = 0), format integer, value blob);
create table if not exists seats (position integer primary key, state integer, attempt integer, lease_id integer,
    owner text, request integer, version integer, rewound integer, num_tokens integer, last_step integer, place blob);
create table if not exists prompts (position integer primary key, prompt blob);
create table if not exists used (step integer, position integer, primary key (step, position)) without rowid;
create index if not exists used_by_position on used (position);
create table if not exists steps (step integer primary key, uses integer);
create table if not exists curriculum (key text primary key, streak integer, rest integer) without rowid;
create table if not exists redo (id integer primary key check (id = 0), epoch integer);
"""
ALL = ("meta", "seats", "prompts", "used", "steps", "curriculum")


class JournalFull(RuntimeError):
    """The disk takes no more; what was acknowledged is safe."""


def connect(folder: Path, *, records: bool) -> sqlite3.Connection:
    """The database in a folder, new or of this format. `records`: there are some that it may not have been told.

    Raises ValueError when another asyncrl has written it.
    """
    # Opened by whoever builds the server, then used by the one thread that runs it.
    db = sqlite3.connect(folder / "journal.sqlite", isolation_level=None, check_same_thread=False)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = normal")
    db.executescript(_TABLES)
    (version,) = db.execute("pragma user_version").fetchone()
    (former,) = db.execute("select max(format) from meta").fetchone()
    if not version and former is None and not records:
        db.execute(f"pragma user_version = {FORMAT}")
    elif version != FORMAT:
        db.close()
        raise ValueError(
            f"{folder} has journal format {version or former or 'unknown'}, this asyncrl writes {FORMAT}: resume with "
            "the asyncrl that wrote it, or with replay.journal false, which repeats or skips some prompts"
        )
    return db


@contextmanager
def naming_a_full_disk() -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        raise JournalFull(
            f"the replay journal cannot be written: {error}; free some space and resume the run, nothing that was "
            "acknowledged is lost"
        ) from error


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing."""
    db.execute("begin immediate")
    try:
        yield
    except BaseException:
        db.execute("rollback")
        raise
    db.execute("commit")
