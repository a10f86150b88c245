"""A process of another run is refused before it takes anybody's place, leases anything or rewinds the journal."""

from pathlib import Path

import pytest
from replay_helpers import make_run, run_async, serving

from asyncrl.fingerprint import differences, fingerprint
from asyncrl.replay.client import ReplayClient
from asyncrl.settings import load, load_run, resolve, save


def of(**keys: str) -> dict[str, str]:
    return fingerprint(
        resolve(load(None, {"run_dir": "r"} | {k.replace("__", "."): v for k, v in keys.items()})).config
    )


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("algo__temperature", "algo"),
        ("env__digits", "env"),
        ("training__seq_len", "training"),
        ("name", "name"),
        ("generation__max_tokens", "generation"),
    ],
)
def test_what_decides_the_groups_tells_runs_apart(key, section):
    assert differences(of(**{key: "3"}), of(**{key: "4"})) == [section]


def test_folders_addresses_and_devices_may_differ_from_host_to_host():
    here = {"run_dir": "there", "replay__keys": "k", "replay__bind": "tcp://127.0.0.1:9", "model__attention": "sdpa"}
    more = {"generation__device": "cpu", "generation__max_concurrency": "8", "services__generator__num_replicas": "7"}
    assert differences(of(), of(**here, **more)) == []


def test_a_folder_that_is_read_back_tells_the_same(tmp_path):
    run = resolve(load(None, {"run_dir": str(tmp_path), "training.learning_rate": "1e-5"}))
    save(run)
    assert fingerprint(load_run(tmp_path).config) == fingerprint(run.config)


@pytest.mark.parametrize("role", ["trainer", "reference"])
def test_a_process_of_another_run_is_told_what_differs(tmp_path: Path, role: str) -> None:
    run = make_run(str(tmp_path))
    other = {**fingerprint(run.config), "env": "another"}
    with serving(run) as made:
        client = ReplayClient(made.address, role=role, run=other)
        with pytest.raises(ValueError, match="belongs to another run than this server: env differ"):
            client.hello()
        client.close()


def test_a_generator_of_another_run_takes_nobodys_place(tmp_path: Path) -> None:
    run = make_run(str(tmp_path))

    async def work(client):
        await client.hello()
        stranger = type(client)(made.address, index=0, run={**fingerprint(run.config), "algo": "another"})
        with pytest.raises(ValueError, match="algo differ in its"):
            await stranger.hello()
        stranger.close()
        return await client.heartbeat({})

    with serving(run) as made:
        assert run_async(work, made.address) is True
