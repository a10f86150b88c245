"""Checkpoints through torch's distributed checkpoint: written in the background, complete or not there at all.

    checkpoints/.step-000050.part/     while it is written
    checkpoints/step-000050/           weights and optimiser, sharded; any number of ranks reads them back
        trainer.json                   step, version: also the position in the replay journal
        COMPLETE                       size and CRC-32 of every file; a folder without it, or that differs, is ignored

Schedule and randomness are functions of the step (optimizer.py, step.py), so the step stands for them. All methods of
Checkpointer are collective over the trainer's ranks. Reading unpickles torch's own metadata file, as torch's format
wants: read only checkpoints that you trust.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from asyncrl.config import CheckpointConfig
from asyncrl.training.model import Policy, reshard
from asyncrl.training.ranks import Ranks

log = logging.getLogger(__name__)
MARKER, POSITION = "COMPLETE", "trainer.json"


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run was: `step` batches trained; `version` is what the weights are called."""

    step: int
    version: int


class Checkpointer:
    """Writes and reads the checkpoints of one run folder."""

    def __init__(self, folder: Path, *, config: CheckpointConfig, ranks: Ranks) -> None:
        self.folder, self._config, self._ranks = folder, config, ranks
        self._group = dist.new_group(backend="gloo")  # the background thread's own: never mixed with other collectives
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, position: Position) -> None:
        """Copy the state and begin to write it; training may go on at once. Waits for the one before, if still busy."""
        self.wait()
        part = self.folder / f".{_name(position.step)}.part"
        if self._ranks.is_first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self._ranks.barrier()
        writer = dcp.FileSystemWriter(part, thread_count=1, sync_files=True)
        written = dcp.async_save(_state(policy, optimizer), storage_writer=writer, process_group=self._group)
        assert isinstance(written, Future)
        self._running = self._finisher.submit(self._finish, written, part, position)

    def wait(self) -> None:
        """Until the checkpoint being written is complete. Raises what went wrong with it."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def close(self) -> None:
        self.wait()
        self._finisher.shutdown()

    def newest(self) -> Path | None:
        """The newest complete checkpoint, as rank 0 sees it; None before the first. Raises ValueError when there are
        some and none is complete: to start afresh would delete what the run has done."""
        name = ""
        if self._ranks.is_first:
            found = self._find_newest()
            name = found.name if found is not None else ""
        name = self._ranks.broadcast(name.encode()).decode()
        return self.folder / name if name else None

    def _find_newest(self) -> Path | None:
        for part in self.folder.glob(".step-*.part"):
            log.warning("checkpoint %s was never finished: skipped", part)
        for path in reversed(self.steps()):
            if is_complete(path):
                return path
            log.warning("checkpoint %s is incomplete or damaged: skipped", path)
        if damaged := self.steps():
            raise ValueError(
                f"no checkpoint in {self.folder} can be used: {', '.join(p.name for p in damaged)} incomplete or "
                "damaged; put a copy of one there, or delete the folder to start afresh"
            )
        return None

    def load(self, path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Position:
        """Put weights and optimiser state back, whatever number of ranks wrote them."""
        state = _state(policy, optimizer)
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), process_group=self._group)
        set_state_dict(
            policy,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=True),
        )
        return msgspec.json.decode((path / POSITION).read_bytes(), type=Position)

    def steps(self) -> list[Path]:
        """Folders of finished checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*"))

    def oldest_step(self, *, until: int) -> int | None:
        """The oldest of the `keep_last` newest steps up to `until`: what was consumed before it leaves the journal.

        Those that are kept for good do not count: a journal that reached back to them would grow for ever.
        """
        kept = [step for step in map(_step, self.steps()) if step <= until]
        return kept[-self._config.keep_last :][0] if kept else None

    def _finish(self, written: Future[Any], part: Path, position: Position) -> None:
        """Waits for the writing of all ranks; rank 0 then seals, renames and prunes."""
        written.result()
        if not self._ranks.is_first:
            return
        _write(part / POSITION, msgspec.json.encode(position))
        seal(part)
        final = self.folder / _name(position.step)
        if final.exists():  # written once more after a resume from before it; aside, so that one is always there
            os.replace(final, self.folder / f".{final.name}-former.part")
        os.replace(part, final)
        _sync(self.folder)
        self._prune(position.step)

    def _prune(self, until: int) -> None:
        """Delete what is not kept, and what was never finished. Damaged ones beyond `until` are no reason to delete
        good ones before it."""
        config, paths = self._config, [path for path in self.steps() if _step(path) <= until]
        for_good = config.keep_every * config.every  # in steps; 0: none
        doomed = [p for p in paths[: -config.keep_last] if not for_good or _step(p) % for_good]
        for path in [*doomed, *self.folder.glob(".step-*.part")]:
            shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    reshard(policy)
    model, optim = get_state_dict(policy, optimizer)
    return {"model": model, "optimizer": optim}


def seal(folder: Path) -> None:
    """Write the marker: size and checksum of every file."""
    files = {p.name: (p.stat().st_size, _crc(p)) for p in sorted(folder.iterdir()) if p.name != MARKER}
    temporary = folder / f".{MARKER}"
    _write(temporary, msgspec.json.encode(files))
    os.replace(temporary, folder / MARKER)
    _sync(folder)


def _write(path: Path, content: bytes) -> None:
    """Write a file that survives a power cut."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def is_complete(folder: Path) -> bool:
    """Every file that the marker names is there, whole and unchanged."""
    try:
        files = msgspec.json.decode((folder / MARKER).read_bytes(), type=dict[str, tuple[int, int]])
        return all((folder / n).stat().st_size == size and _crc(folder / n) == crc for n, (size, crc) in files.items())
    except (OSError, msgspec.DecodeError):
        return False


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _sync(folder: Path) -> None:
    """Make a rename survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
