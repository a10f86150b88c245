"""The buffer on disk: an acknowledged insert survives `kill -9` of any process, and a run resumes exactly.

Called by `server.py`: `commit` once per turn, before that turn's replies leave; `restore` at start; `rewind` when a
resumed trainer names its checkpoint; `forget` when old checkpoints are gone. SQLite in WAL mode holds seats, prompts,
which step used which seat, what the curriculum has learnt, and the counters; `segments.py` holds the groups' bytes;
`redo.py` what SQLite has not been told yet, for a transaction is shared by many turns. One thread, one connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.curriculum import Curriculum, Record
from asyncrl.replay import database
from asyncrl.replay.buffer import TAKES_KEPT, Buffer
from asyncrl.replay.database import JournalFull, naming_a_full_disk, transaction
from asyncrl.replay.ledger import Ledger, Means
from asyncrl.replay.line import Changes, Seat
from asyncrl.replay.messages import Place
from asyncrl.replay.parcel import Parcel, parcel_of
from asyncrl.replay.redo import Redo, Turn, merge
from asyncrl.replay.segments import Segments
from asyncrl.replay.spool import Key, gather
from asyncrl.replay.standing import Standing
from asyncrl.types import NOT_SAMPLED, Prompt

WAITING, LEASED, BUFFERED, USED_UP = range(4)
PENDING_BYTES = 64 << 10
"""Records that may wait for their transaction; as many are read again after a crash."""
SPARE_SEGMENTS = 8
"""Free segment files that are kept to be written over."""


class Counters(msgspec.Struct, kw_only=True):
    """What the buffer knows beside its seats."""

    cursor: int = 0
    next_lease: int
    step: int = 0
    made_uses: int = 0
    live_version: int = NOT_SAMPLED
    live_uses: int = 0
    finished: str | None = None
    rejected: dict[str, int] = {}
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    trained_means: Means = msgspec.field(default_factory=Means)
    dropped_means: Means = msgspec.field(default_factory=Means)
    largest_bytes: int = 0
    standing: Standing = msgspec.field(default_factory=Standing)
    skipped: int = 0
    """By the curriculum."""


class Journal:
    """One run's journal. `blank(cursor)` makes an empty buffer that continues the prompts at `cursor`."""

    def __init__(self, folder: Path, blank: Callable[[int], Buffer]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._blank = blank
        self._redo, self._pending = Redo(folder / "redo.bin"), list[Turn]()
        try:
            self._db = database.connect(folder, records=not self._redo.is_empty())
        except ValueError:
            self._redo.close()
            raise
        self._forgettable = 0
        """What was used up by this step leaves with the next transaction."""
        (self._epoch,) = self._db.execute("select coalesce(max(epoch), 0) from redo").fetchone()
        self._pending += map(_TURNS.decode, self._redo.read(self._epoch + 1))
        self.flush()
        self._redo.empty()
        self.left = folder / "left"
        """Where generators leave groups."""
        self._used_there = set[Key]()
        self._segments = Segments(folder / "groups", self._used_segments())
        self._places: dict[int, bytes] = {}
        """Places of buffered groups, by position."""
        self._written = b""
        self._steps: dict[int, int] = {}
        """Counters and uses by step as they were written last."""

    # Writing

    def commit(self, buffer: Buffer, standing: Standing) -> None:
        """Make everything that changed since the last commit safe. Raises JournalFull."""
        changes, counters = buffer.changes, _ENCODER.encode(_counters(buffer, standing))
        if not changes.seats and counters == self._written:
            return
        with naming_a_full_disk():
            if self._forgettable and not self._segments.hold(p.nbytes for p in changes.arrived.values() if not p.place):
                self.flush()
            self._used_there |= {(p.place.owner, p.place.segment) for p in changes.arrived.values() if p.place}
            for position, parcel in changes.arrived.items():
                self._places[position] = _ENCODER.encode(parcel.place or self._segments.append(parcel.frames))
            turn = self._turn(changes, buffer.uses_by_step, buffer.curriculum, counters)
            self._redo.append(self._epoch + 1, _ENCODER.encode(turn))
        self._pending.append(turn)
        for seat in changes.seats.values():
            seat.stored = True  # not before: a turn that did not fit is written again, with its prompts
        self._written, self._steps = counters, dict(buffer.uses_by_step)
        changes.clear()
        if buffer.curriculum is not None:
            buffer.curriculum.changed.clear()
        if self._redo.size >= PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Tell the database what it has not been told yet. Raises JournalFull."""
        if not self._pending and not self._forgettable:
            return
        with naming_a_full_disk():
            with transaction(self._db):
                if self._pending:
                    self._write(merge(self._pending))
                    self._db.execute("insert or replace into redo values (0, ?)", (self._epoch + 1,))
                if self._forgettable:
                    self._delete_used_up(self._forgettable)
            if self._pending:
                self._epoch += 1
                self._pending.clear()
                self._redo.empty()
            if self._forgettable:
                self._forgettable = 0
                self._segments.keep(self._used_segments())
                self._segments.trim(SPARE_SEGMENTS)

    def _turn(
        self, changes: Changes, uses_by_step: dict[int, int], curriculum: Curriculum | None, counters: bytes
    ) -> Turn:
        present = [s for s in changes.seats.values() if not s.removed]
        removed = [s.position for s in changes.seats.values() if s.removed]
        new = [s for s in present if not s.stored]
        taken = uses_by_step != self._steps
        turn = Turn(
            seats=[self._row(s) for s in present],
            prompts=[(s.position, _ENCODER.encode(s.prompt)) for s in new],
            removed=removed,
            used=list(changes.uses) if taken else [],
            steps=list(uses_by_step.items()) if taken else [],
            curriculum=_learnt(curriculum) if curriculum is not None else [],
            counters=counters,
        )
        for position in removed:
            self._places.pop(position, None)
        return turn

    def _write(self, turn: Turn) -> None:
        run = self._db.executemany
        run("insert or replace into seats values (?,?,?,?,?,?,?,?,?,?,?)", turn.seats)
        run("insert or replace into prompts values (?, ?)", turn.prompts)
        run("insert or replace into used values (?, ?)", turn.used)
        run("insert or replace into steps values (?, ?)", turn.steps)
        run("insert or replace into curriculum values (?, ?, ?)", [r for r in turn.curriculum if r[1] is not None])
        run("delete from curriculum where key = ?", [r[:1] for r in turn.curriculum if r[1] is None])
        self._delete(turn.removed)
        self._db.execute("insert or replace into meta values (0, ?, ?)", (database.FORMAT, turn.counters))

    def _row(self, seat: Seat) -> tuple[Any, ...]:
        state = USED_UP if seat.used_up else BUFFERED if seat.parcel else LEASED if seat.owner else WAITING
        lease = (seat.attempt, seat.lease_id, seat.owner, seat.request, seat.version)
        then = (seat.rewound, seat.num_tokens, seat.last_step, self._places.get(seat.position))
        return (seat.position, state, *lease, *then)

    def _delete(self, positions: Iterable[int]) -> None:
        gone = [(p,) for p in positions]
        for table in ("seats", "prompts", "used"):
            self._db.executemany(f"delete from {table} where position = ?", gone)

    def forget(self, step: int, buffer: Buffer) -> None:
        """Nobody will rewind to before `step`: what had left the line by then goes, soon or when space is needed."""
        self._forgettable = max(0, min(step, buffer.step - TAKES_KEPT))

    def _delete_used_up(self, step: int) -> None:
        # Up to the anchor as it was after that step: seats behind it count for the window again after a rewind.
        left = f"select position from seats where state != {USED_UP} or last_step > ? order by position limit 1"
        (anchor,) = self._db.execute(left, (step,)).fetchone() or (1 << 62,)
        gone = [p for (p,) in self._db.execute("select position from seats where position < ?", (anchor,))]
        self._delete(gone)
        for position in gone:
            self._places.pop(position, None)
        self._db.execute("delete from steps where step < ?", (step,))

    def close(self) -> None:
        """Close the files; everything committed stays."""
        with suppress(JournalFull):  # it is in the file of records, and read from there next time
            self.flush()
        self._db.close()
        self._redo.close()
        self._segments.close()

    # Reading

    def restore(self, *, now: float = 0.0) -> tuple[Buffer, Standing]:
        """The buffer and the processes' standing as they were committed last. Leases go on from `now`."""
        self.flush()
        found = self._db.execute("select value from meta").fetchone()
        if found is None:
            return self._blank(0), Standing()
        counters = _COUNTERS.decode(found[0])
        buffer = self._blank(counters.cursor)
        _apply(counters, buffer)
        if buffer.curriculum is not None:
            rows = self._db.execute("select key, streak, rest from curriculum")
            buffer.curriculum.records.update({key: Record(streak=streak, rest=rest) for key, streak, rest in rows})
            buffer.curriculum.skipped = counters.skipped
        buffer.uses_by_step = dict(
            self._db.execute("select step, uses from steps where uses >= ? order by step", (buffer.live_uses,))
        )
        parcels: dict[int, Parcel] = {}
        for seat, place in self._seats(buffer.limits.reuse, now):
            self._places[seat.position] = place
            if not seat.owner and place:
                self._load(buffer, seat, place, parcels)
            buffer.seat_in(seat)
        buffer.line.trim()
        for step in range(max(1, buffer.step - TAKES_KEPT + 1), buffer.step + 1):
            positions = self._db.execute("select position from used where step = ? order by position", (step,))
            buffer.recent[step] = [parcels[p] for (p,) in positions]
        return buffer, counters.standing

    def rewind(self, *, step: int) -> Buffer:
        """The buffer as a trainer finds it that resumes from the checkpoint of `step`: what was used later is available
        again and nothing before; groups that were in flight are leased again. No lease is granted before weights are
        published. Step 0 is no checkpoint: everything starts afresh. Raises ValueError when it lies too far back."""
        self.flush()
        uses = self._db.execute("select uses from steps where step = ?", (step,)).fetchone()
        if uses is None and step:
            raise ValueError(
                f"the replay journal cannot go back to step {step}; without its journal a run resumes with "
                "replay.journal false, and then repeats or skips some prompts"
            )
        with naming_a_full_disk(), transaction(self._db):
            if step:
                self._undo(step, uses[0])
            else:
                self._start_afresh()
        self._places.clear()
        self._segments.keep(self._used_segments())
        self._written, self._steps = b"", {}
        return self.restore()[0]

    def _start_afresh(self) -> None:
        """In the database: nothing is left but the number of the next lease and who was the trainer."""
        found = self._db.execute("select value from meta").fetchone()
        for table in database.ALL:
            self._db.execute(f"delete from {table}")
        former = _COUNTERS.decode(found[0]) if found else Counters(next_lease=0)
        counters = Counters(next_lease=former.next_lease, standing=Standing(trainers=former.standing.trainers))
        self._db.execute("insert into meta values (0, ?, ?)", (database.FORMAT, _ENCODER.encode(counters)))

    def _undo(self, step: int, uses: int) -> None:
        """In the database: make every use after `step` undone and every lease ended."""
        run = self._db.execute
        counters = _COUNTERS.decode(run("select value from meta").fetchone()[0])
        ledger = counters.ledger
        back = f"state = {USED_UP} and last_step > {step:d}"
        (groups, tokens) = run(f"select count(*), coalesce(sum(num_tokens), 0) from seats where {back}").fetchone()
        ledger.groups.trained -= groups
        ledger.tokens.trained -= tokens
        (in_flight,) = run("select count(*) from seats where state = ?", (LEASED,)).fetchone()
        ledger.groups.drop("expired", in_flight)
        run("delete from used where step > ?", (step,))
        run("delete from steps where step > ?", (step,))
        run(f"update seats set state = {BUFFERED} where {back}")
        run(f"update seats set rewound = 1 where state = {BUFFERED}")
        last = "coalesce((select max(step) from used where used.position = seats.position), 0)"
        run(f"update seats set last_step = {last} where last_step > ?", (step,))
        # A crash is not the prompt's fault: the next lease counts as the same attempt.
        run(f"update seats set state = {WAITING}, owner = '', attempt = attempt - 1 where state = {LEASED}")
        counters.step, counters.made_uses, counters.live_uses = step, uses, uses
        counters.live_version, counters.finished = NOT_SAMPLED, None
        counters.rejected = {}
        counters.standing = Standing(trainers=counters.standing.trainers)
        run("update meta set value = ?", (_ENCODER.encode(counters),))

    def _seats(self, reuse: int, now: float) -> Iterator[tuple[Seat, bytes]]:
        rows = self._db.execute(
            "select seats.*, prompt, (select count(*) from used where used.position = seats.position) "
            "from seats join prompts using (position) order by position"
        )
        for position, state, *lease, rewound, num_tokens, last_step, place, prompt, uses in rows:
            attempt, lease_id, owner, request, version = lease
            seat = Seat(
                position=position,
                prompt=_PROMPTS.decode(prompt),
                attempt=attempt,
                lease_id=lease_id,
                owner=owner,
                request=request,
                granted_at=now,
                renewed_at=now,
                version=version,
                uses=uses,
                used_up=state == USED_UP or uses >= reuse,
                rewound=bool(rewound),
                num_tokens=num_tokens,
                last_step=last_step,
                stored=True,
            )
            yield seat, place

    def _load(self, buffer: Buffer, seat: Seat, place: bytes, parcels: dict[int, Parcel]) -> None:
        """Read the group of a seat if it is buffered or can be asked for again."""
        if seat.used_up and seat.last_step <= buffer.step - TAKES_KEPT:
            return
        at = _PLACES.decode(place)
        parcel = parcel_of(gather(self.left, [at], ()) if at.owner else self._segments.read(at))
        parcels[seat.position] = parcel
        if not seat.used_up:
            seat.parcel = parcel

    def _used_segments(self) -> set[int]:
        """Those of the journal that are referred to; those of generators are noted."""
        rows = self._db.execute("select place from seats where place is not null")
        places = [_PLACES.decode(p) for (p,) in rows]
        self._used_there = {(p.owner, p.segment) for p in places if p.owner}
        return {p.segment for p in places if not p.owner}

    def recorded(self) -> set[Key]:
        """Generators' segments that are referred to."""
        return self._used_there


def _counters(buffer: Buffer, standing: Standing) -> Counters:
    same = {name: getattr(buffer, name) for name in _SAME_NAMES}
    skipped = buffer.curriculum.skipped if buffer.curriculum is not None else 0
    return Counters(rejected=dict(buffer.rejected), standing=standing, skipped=skipped, **same)


def _learnt(curriculum: Curriculum) -> list[tuple[str, int | None, int | None]]:
    known = [(key, curriculum.records.get(key)) for key in curriculum.changed]
    return [(key, record.streak, record.rest) if record is not None else (key, None, None) for key, record in known]


def _apply(counters: Counters, buffer: Buffer) -> None:
    for name in _SAME_NAMES:
        setattr(buffer, name, getattr(counters, name))
    buffer.rejected = Counter(counters.rejected)


_SAME_NAMES = tuple(name for name in Counters.__struct_fields__ if name not in ("rejected", "standing", "skipped"))
_ENCODER = msgspec.msgpack.Encoder()
_COUNTERS = msgspec.msgpack.Decoder(Counters)
_PROMPTS = msgspec.msgpack.Decoder(Prompt)
_TURNS = msgspec.msgpack.Decoder(Turn)
_PLACES = msgspec.msgpack.Decoder(Place)
