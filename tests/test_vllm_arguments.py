"""Which vLLM engine arguments a user may set, and how the others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from asyncrl.generation.vllm_args import MANAGED, engine_arguments  # noqa: E402  (needs vLLM)
from asyncrl.generation.vllm_logits import has_switch  # noqa: E402
from asyncrl.settings import load, resolve  # noqa: E402
from asyncrl.shared_gpu import MEMORY_SHARE  # noqa: E402


def arguments(folder: Path, *, on_gpu: bool = False, index: int = 0, **overrides: object) -> dict:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    config = resolve(load(None, {"run_dir": str(folder), **keys})).config
    return engine_arguments(config, index=index, on_gpu=on_gpu)


def test_unknown_argument_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation\.vllm\.max_num_seq is no engine argument.*max_num_seqs"):
        arguments(tmp_path, generation__vllm={"max_num_seq": 8})


@pytest.mark.parametrize("name", sorted(MANAGED))
def test_argument_that_asyncrl_sets_is_refused_with_what_to_set_instead(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"generation\.vllm\.{name} cannot be set: \w+"):
        arguments(tmp_path, generation__vllm={name: None})


def test_any_other_argument_reaches_vllm_and_wins_over_a_default(tmp_path: Path) -> None:
    chosen = arguments(tmp_path, generation__vllm={"gpu_memory_utilization": 0.4, "stream_interval": 1})
    assert chosen["gpu_memory_utilization"] == 0.4
    assert chosen["stream_interval"] == 1


def test_a_generator_that_shares_its_gpu_takes_the_part_it_was_told_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "gpu_memory_utilization" not in arguments(tmp_path, on_gpu=True)
    monkeypatch.setenv(MEMORY_SHARE, "0.15")
    assert arguments(tmp_path, on_gpu=True)["gpu_memory_utilization"] == 0.15
    chosen = arguments(tmp_path, on_gpu=True, generation__vllm={"gpu_memory_utilization": 0.5})
    assert chosen["gpu_memory_utilization"] == 0.5


def test_replicas_differ_in_seed_and_share_the_rest(tmp_path: Path) -> None:
    first, second = arguments(tmp_path, index=0), arguments(tmp_path, index=1)
    assert {key for key in first if first[key] != second[key]} == {"seed", "model"}


def test_tensor_parallel_size_is_the_processes_of_a_generator(tmp_path: Path) -> None:
    assert arguments(tmp_path, services__generator__procs=2)["tensor_parallel_size"] == 2


def test_weights_are_bfloat16_on_a_gpu_and_float32_on_cpu_unless_chosen(tmp_path: Path) -> None:
    assert arguments(tmp_path, on_gpu=True, generation__dtype="auto")["dtype"] == "bfloat16"
    assert arguments(tmp_path, generation__dtype="auto")["dtype"] == "float32"
    assert arguments(tmp_path, generation__dtype="bfloat16")["dtype"] == "bfloat16"


@pytest.mark.skipif(not has_switch(), reason="a vLLM without head_dtype gets another output head instead")
def test_logits_are_float32_unless_switched_off_or_quantised(tmp_path: Path) -> None:
    def overrides(**keys: object) -> dict:
        return arguments(tmp_path, **keys).get("hf_overrides", {})

    own = {"hf_overrides": {"rope_theta": 1e4}}
    assert overrides(generation__vllm=own) == {"head_dtype": "float32", "rope_theta": 1e4}
    assert overrides(generation__fp32_lm_head=False, generation__vllm=own) == own["hf_overrides"]
    assert overrides(generation__vllm={"quantization": "fp8"}) == {}
    assert overrides(generation__vllm={"hf_overrides": {"head_dtype": "model"}}) == {"head_dtype": "model"}


def test_longest_sequence_is_what_is_trained_within_what_the_model_can(tmp_path: Path) -> None:
    assert arguments(tmp_path, training__seq_len=64)["max_model_len"] == 64
    assert arguments(tmp_path, training__seq_len=100_000)["max_model_len"] == 2048


def test_text_from_the_command_line_becomes_the_number_or_switch_it_says(tmp_path: Path) -> None:
    overrides = {"generation.vllm.max-num-seqs": "8", "generation.vllm.enforce-eager": "true"}
    config = resolve(load(None, {"run_dir": str(tmp_path), **overrides})).config
    chosen = engine_arguments(config, index=0, on_gpu=False)
    assert (chosen["max_num_seqs"], chosen["enforce_eager"]) == (8, True)
