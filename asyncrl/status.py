"""Who waits for whom: asked of the replay server once a second, kept in status.json, printed by `asyncrl status RUN`.

The launcher owns a Poller; its thread owns the connection. A server that does not answer leaves the last status
standing. Where the roles were started one by one there is no launcher, and `asyncrl status` asks the server itself.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.metrics import read_rows
from asyncrl.notices import dropped

EVERY_S = 1.0
ASK_S = 5.0
"""How long `asyncrl status` waits for a server that it asks itself."""
ADDRESS_FILE = "address.json"
Row = dict[str, Any]


class Poller:
    """Keeps `status` fresh and status.json written while the launcher does other things."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.status, self.phase = run_dir, {}, "starting"
        self._seen: dict[tuple[str, int], float] = {}
        self._address, self._curve_dir = "", None
        self._asked, self._finish_reason = threading.Event(), ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    status: Row
    """The server's own report; {} before the first."""
    phase: str
    """What the launcher is doing; shown and written."""
    _curve_dir: str | None

    def __enter__(self) -> Poller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._write()

    def connect(self, address: str, *, curve_dir: str | None = None) -> None:
        """Start asking the server at `address`."""
        self._address, self._curve_dir = address, curve_dir
        self._thread = threading.Thread(target=self._serve, name="status", daemon=True)
        self._thread.start()

    def has_served(self, role: str, index: int, *, since: float) -> bool:
        """Whether the server knew this process, ready to work, at some time after `since` (monotonic)."""
        return self._seen.get((role, index), 0.0) > since

    def finish(self, reason: str) -> None:
        """Ask the server to end the generators; returns at once."""
        self._finish_reason = reason
        self._asked.set()

    def close(self) -> None:
        """Take a last report and end the thread; waits at most a few seconds."""
        self._closed.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _serve(self) -> None:
        """Consumes: reports. Waits for: the next second. Unblocked by: finish() and close(). Produces: status.json."""
        from asyncrl.replay.client import ReplayClient
        from asyncrl.replay.keys import load_keys

        client = ReplayClient(self._address, role="launcher", curve=load_keys(self._curve_dir, "client"))
        try:
            while True:
                last = self._closed.is_set()
                self._ask(client)
                self._write()
                if last:
                    return
                self._asked.wait(EVERY_S)
                self._asked.clear()
        finally:
            client.close()

    def _ask(self, client: Any) -> None:
        try:
            if self._finish_reason:
                client.finish(self._finish_reason)
                self._finish_reason = ""
            self.status = client.status()
        except Exception as error:  # noqa: BLE001 (the display must not end a run; the launcher sees a dead server itself)
            self.status = {**self.status, "unreachable": str(error)}
            return
        for process in self.status.get("processes", []):
            if process["ready"]:
                self._seen[process["role"], process["index"]] = time.monotonic() - process["heard_s"]

    def _write(self) -> None:
        temporary = self.run_dir / "status.json.part"
        record = {"time": time.time(), "phase": self.phase, "launcher": os.getpid(), "server": self.status}
        with suppress(OSError):  # a full disk: what stands there tells its age, and the next second tries again
            temporary.write_bytes(msgspec.json.encode(record))
            os.replace(temporary, self.run_dir / "status.json")


def _last(row: Row) -> str:
    shown = {"reward": row.get("reward/mean"), "loss": row.get("sft/loss")}
    return ", ".join([f"last step {row['step']}", *(f"{name} {v:.3f}" for name, v in shown.items() if v is not None)])


def describe(run_dir: Path) -> list[str]:
    """`asyncrl status RUN` as lines. Raises ValueError when the folder holds no run."""
    path, address = run_dir / "status.json", run_dir / ADDRESS_FILE
    if not path.exists() and not address.exists():
        raise ValueError(f"{run_dir} has neither status.json nor {ADDRESS_FILE}: no run was started there")
    if not path.exists() or (address.exists() and address.stat().st_mtime > path.stat().st_mtime):
        lines = _ask_server(run_dir)
    else:
        lines = _told_by_launcher(run_dir, msgspec.json.decode(path.read_bytes()))
    rows = read_rows(run_dir)
    if rows:
        lines.append(_last(rows[-1]))
    return lines


def _told_by_launcher(run_dir: Path, record: Row) -> list[str]:
    age_s, server = time.time() - record["time"], record["server"]
    lines = [f"{run_dir}: {record['phase']}, as of {age_s:.0f} s ago"]
    if age_s > 10 and record["phase"] not in ("done", "failed", "interrupted"):
        lines.append(f"the launcher (process {record['launcher']}) has stopped writing: it is gone or stuck")
    return lines + (_server_lines(server, age_s) if server else [])


def _ask_server(run_dir: Path) -> list[str]:
    """The roles were started one by one, without a launcher: the server's word, from this host."""
    from asyncrl.replay.client import ReplayClient
    from asyncrl.replay.keys import load_keys
    from asyncrl.replay.server import read_address
    from asyncrl.settings import load

    address, keys = read_address(run_dir, timeout_s=0.0), load(run_dir / "config.yaml").replay.keys
    client = ReplayClient(address, role="status", curve=load_keys(keys, "client"))
    try:
        server = client.status(ASK_S)
        client.leave()
    except TimeoutError:
        return [
            f"{run_dir}: the replay server at {address} has not answered within {ASK_S:.0f} s: it has ended, or this "
            "host cannot reach it or has no key that it lets in (replay.keys)"
        ]
    finally:
        client.close()
    others = [p for p in server["processes"] if p["role"] != "status"]
    phase = f"finished ({server['finished']})" if server["finished"] else "running"
    return [f"{run_dir}: {phase}, says the replay server at {address}", *_server_lines({**server, "processes": others})]


def _server_lines(server: Row, age_s: float = 0.0) -> list[str]:
    ledger = server.get("ledger", {})
    counts = ", ".join(f"{k.removeprefix('ledger/')} {v:.0f}" for k, v in ledger.items() if k.startswith("ledger/"))
    lines = [f"step {server.get('step')}, version {server.get('version')} live", f"groups: {counts}"]
    for reason, n in dropped(ledger).items():
        why = server.get("why_dropped", {}).get(reason)
        lines.append(f"  dropped {n:.0f} {reason}" + (f"; the last: {why}" if why else ""))
    for p in server.get("processes", []):
        about = f"  {p['role']} {p['index']}: heard {p['heard_s'] + age_s:.0f} s ago"
        if p["role"] == "generator":
            about += f", {p['leases']} groups"
        if p["role"] in ("generator", "reference"):
            about += f", {p['tokens_per_s']:.0f} tokens/s, busy {100 * p['busy']:.0f}%"
            about += "" if p["ready"] else ", loads its model"
        about += f", {p['does']}" if p.get("does") else ""
        lines.append(about)
    lines += [f"  {w['who']} waits {w['for_s']:.0f} s: {w['why']}" for w in server.get("waiting", [])]
    return lines
