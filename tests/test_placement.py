"""Placement: who sees which GPU, and what is said when there are too few."""

import sys

import msgspec
import pytest

from asyncrl.config import ReferenceConfig, ServiceConfig, ServicesConfig
from asyncrl.launch import hold_port
from asyncrl.placement import VISIBLE, place
from asyncrl.shared_gpu import MEMORY_SHARE, WITH_GENERATOR
from asyncrl.supervise import Crew, Spec


def services(ranks: int, replicas: int, procs: int = 1, **trainer) -> ServicesConfig:
    return ServicesConfig(
        trainer=ServiceConfig(procs=ranks, **trainer), generator=ServiceConfig(num_replicas=replicas, procs=procs)
    )


def seen(placement) -> list[str]:
    return [env[VISIBLE] for env in placement.generators]


def test_without_gpus_nobody_sees_one():
    placement = place([], services(2, 2))
    assert (placement.trainer[VISIBLE], seen(placement)) == ("", ["", ""])


def test_the_trainer_gets_the_first_gpus_and_each_generator_its_own():
    placement = place(list("0123"), services(2, 2))
    assert (placement.trainer, placement.notes) == ({VISIBLE: "0,1"}, [])
    assert placement.generators == [{VISIBLE: "2"}, {VISIBLE: "3"}]


def test_tensor_parallel_generators_get_several():
    assert seen(place(list("01234567"), services(4, 2, procs=2))) == ["4,5", "6,7"]


def test_too_few_gpus_are_shared_and_it_is_said():
    placement = place(list("01"), services(1, 3))
    assert seen(placement) == ["1", "1", "1"]
    assert "shared" in placement.notes[0]
    assert placement.trainer[WITH_GENERATOR] == "1"  # NCCL would connect the three with each other
    assert {env[MEMORY_SHARE] for env in placement.generators} == {"0.3"}  # three share what one would have
    one = place(["0"], services(1, 2))
    assert seen(one) == ["0", "0"]
    assert one.trainer[WITH_GENERATOR] == "1"
    assert {env[MEMORY_SHARE] for env in one.generators} == {"0.15"}


def test_a_generator_beside_a_trainer_on_all_gpus_keeps_off_the_one_of_rank_0():
    placement = place(list("01"), services(2, 1))
    assert seen(placement) == ["1"]
    assert WITH_GENERATOR not in placement.trainer
    assert placement.generators[0][MEMORY_SHARE] == "0.3"
    assert "shared" in placement.notes[0]


def test_a_generator_beside_a_reference_process_leaves_it_memory():
    wanted = msgspec.structs.replace(
        services(1, 2, with_gpus=False), ref_model=ReferenceConfig(with_gpus=True, num_replicas=1)
    )
    placement = place(list("01"), wanted)
    assert placement.references == [{VISIBLE: "0"}]
    assert placement.generators == [{VISIBLE: "0", MEMORY_SHARE: "0.45"}, {VISIBLE: "1"}]


def test_what_another_run_s_launcher_said_about_its_gpus_is_not_inherited(tmp_path, monkeypatch):
    monkeypatch.setenv(WITH_GENERATOR, "1")
    monkeypatch.setenv(MEMORY_SHARE, "0.15")
    told = tmp_path / "told"
    say = "import sys; from asyncrl.shared_gpu import *; open(sys.argv[1], 'w').write"
    say += "(f'{with_generator()} {memory_share()}')"
    with Crew(tmp_path) as crew:
        for env, expected in (({}, "False None"), ({WITH_GENERATOR: "1", MEMORY_SHARE: "0.3"}, "True 0.3")):
            child = crew.start(Spec(role="generator", index=0, command=(sys.executable, "-c", say, str(told)), env=env))
            child.process.wait(60)
            assert told.read_text() == expected


def test_a_trainer_on_the_cpu_leaves_all_gpus_to_generators():
    placement = place(list("01"), services(2, 2, with_gpus=False))
    assert (placement.trainer[VISIBLE], seen(placement)) == ("", ["0", "1"])


def test_reference_processes_get_what_is_left_or_share_the_trainers():
    def references(gpus: str, **keys) -> list[str]:
        wanted = services(1, 1)
        wanted.ref_model = ReferenceConfig(num_replicas=2, **keys)
        placement = place(list(gpus), wanted)
        shared = any("reference processes" in note for note in placement.notes)
        return [env[VISIBLE] for env in placement.references] + ["shared"] * shared

    assert references("0123") == ["2", "3"]
    assert references("012") == ["2", "2", "shared"]
    assert references("01") == ["0", "0", "shared"]
    assert references("0123", with_gpus=False) == references("") == ["", ""]


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match="needs a GPU per rank"):
        place(["0"], services(2, 1))
    with pytest.raises(ValueError, match="shows no GPU"):
        place([], services(1, 1, with_gpus=True))


def test_a_held_port_can_be_listened_on_by_the_one_who_was_told(tmp_path):
    torch = pytest.importorskip("torch")
    with hold_port() as port:
        store = torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
