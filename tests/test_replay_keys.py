"""CURVE: the right key gets in, a stranger, nobody and a replayed session do not."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from replay_helpers import make_run, serving

from asyncrl.cli import main
from asyncrl.replay import exchange as exchange_module
from asyncrl.replay import keys, server
from asyncrl.replay.client import ReplayClient


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.new_keys(tmp_path / "keys")
    return tmp_path / "keys"


def secured_run(tmp_path: Path, folder: Path) -> object:
    return make_run(str(tmp_path / "run"), keys=str(folder), bind="tcp://127.0.0.1:*")


def can_talk(address: str, curve: keys.CurveKeys | None) -> bool:
    client = ReplayClient(address, role="status", curve=curve)
    try:
        return client.status(timeout_s=2.0)["run"] == "run"
    except TimeoutError:
        return False
    finally:
        client.close()


@pytest.fixture(autouse=True)
def _short_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "SILENCE_S", 2.0)


def test_client_on_the_allow_list_gets_in_and_nobody_else(tmp_path: Path, folder: Path) -> None:
    with serving(secured_run(tmp_path, folder)) as made:
        mine = keys.load_keys(folder, "client")
        assert mine is not None
        assert can_talk(made.address, mine)
        assert not can_talk(made.address, None)
        public, secret = zmq.curve_keypair()
        assert not can_talk(made.address, keys.CurveKeys(public=public, secret=secret, server=mine.server))
        assert made.service.malformed == 0
        assert {p.role for p in made.service.peers.known.values()} == {"status"}


def test_whom_the_server_turns_away_its_log_names_once(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(secured_run(tmp_path, folder)) as made:
        mine = keys.load_keys(folder, "client")
        assert mine is not None
        for public, secret in (zmq.curve_keypair(), zmq.curve_keypair()):
            assert not can_talk(made.address, keys.CurveKeys(public=public, secret=secret, server=mine.server))
    said = f"a client at 127.0.0.1 is turned away: its key has no line in {folder / 'allowed'}"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_client_that_is_not_let_in_says_where_it_was_and_what_to_check(tmp_path: Path, folder: Path) -> None:
    with serving(secured_run(tmp_path, folder)) as made:
        client = ReplayClient(made.address, role="trainer")
        with pytest.raises(exchange_module.ServerSilent) as silent:
            client.finish("done")
        client.close()
    assert f"the replay server at {made.address} has not answered within 2 s" in str(silent.value)
    assert "the keys do not match" in str(silent.value)


def test_client_refuses_a_server_with_another_key(tmp_path: Path, folder: Path) -> None:
    with serving(secured_run(tmp_path, folder)) as made:
        mine = keys.load_keys(folder, "client")
        assert mine is not None
        other, _ = zmq.curve_keypair()
        assert not can_talk(made.address, keys.CurveKeys(public=mine.public, secret=mine.secret, server=other))


def test_key_that_is_taken_off_the_list_is_kept_out(tmp_path: Path, folder: Path) -> None:
    keys.add_client(folder, tmp_path / "host2")
    with serving(secured_run(tmp_path, folder)) as made:
        guest = keys.load_keys(tmp_path / "host2", "client")
        assert can_talk(made.address, guest)
        lines = (folder / "allowed").read_bytes().splitlines()
        (folder / "allowed").write_bytes(b"\n".join(lines[:-1]) + b"\n")
        assert not can_talk(made.address, guest)
        assert can_talk(made.address, keys.load_keys(folder, "client"))


@contextmanager
def recording(address: str) -> Iterator[tuple[str, list[bytes]]]:
    """A TCP relay that keeps what the first client sent."""
    host, port = address.removeprefix("tcp://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[bytes] = []

    def pump(source: socket.socket, sink: socket.socket, keep: list[bytes] | None) -> None:
        try:
            while data := source.recv(65536):
                if keep is not None:
                    keep.append(data)
                sink.sendall(data)
        except OSError:
            return
        finally:
            sink.close()

    def accept() -> None:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        threading.Thread(target=pump, args=(far, near, None), daemon=True).start()
        pump(near, far, sent)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", sent
    finally:
        thread.join(5)
        listener.close()


def test_replayed_session_changes_nothing(tmp_path: Path, folder: Path) -> None:
    with serving(secured_run(tmp_path, folder)) as made:
        with recording(made.address) as (address, sent):
            client = ReplayClient(address, role="trainer", curve=keys.load_keys(folder, "client"))
            client.announce("weights", "true")
            client.close()
        made.service.standing.announced["weights"] = ("changed since", "")
        session = b"".join(sent)
        assert b"true" not in session
        host, port = made.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as again:
            again.sendall(session)
            again.settimeout(1.0)
            try:
                while again.recv(65536):
                    pass
            except TimeoutError:
                pass
        assert can_talk(made.address, keys.load_keys(folder, "client"))
        assert made.service.standing.announced["weights"] == ("changed since", "")


def test_server_with_keys_may_listen_to_other_hosts(tmp_path: Path, folder: Path) -> None:
    made = server.open_server(make_run(str(tmp_path / "run"), keys=str(folder)), bind="tcp://0.0.0.0:*")
    made.close()


def test_key_files_are_private_and_secrets_stay_out_of_texts(folder: Path) -> None:
    for name in ("server.key", "client.key"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    loaded = keys.load_keys(folder, "server")
    assert loaded is not None
    assert loaded.secret.decode() not in repr(loaded)
    (folder / "client.key").chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        keys.load_keys(folder, "client")


def test_keys_are_not_overwritten_and_missing_ones_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="holds keys already"):
        keys.new_keys(folder)
    with pytest.raises(ValueError, match="asyncrl keys new"):
        keys.load_keys(tmp_path / "nowhere", "client")
    keys.add_client(folder, tmp_path / "host2")
    assert not (tmp_path / "host2" / "server.key").exists()
    assert keys.load_keys(None, "client") is None


def test_command_makes_keys_and_a_folder_for_another_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", str(tmp_path / "keys")]) == 0
    assert main(["keys", "add", str(tmp_path / "keys"), str(tmp_path / "host2")]) == 0
    loaded = keys.load_keys(tmp_path / "host2", "client")
    assert loaded is not None
    assert loaded.public in keys.allowed_keys(tmp_path / "keys" / "allowed")
    assert loaded.secret.decode() not in capsys.readouterr().out
    assert main(["keys", "old"]) == 2
