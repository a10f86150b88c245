"""vLLM's own models, loaded by learnt copies: bit-equal to vLLM's loading code, whole and in tensor-parallel shards.

Each rank is a child process that builds the models without an engine and without the repacking that a CPU adds after
loading: as they are on a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Named = list[tuple[str, Tensor]]
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = ("Llama", "Qwen2", "Qwen3")  # plain, with biases, with norms of q and k
BUCKET = 5  # tensors


@pytest.mark.parametrize("world", [1, 2])
def test_repeated_copies_equal_load_weights_in_every_rank(world: int, tmp_path: Path) -> None:
    if 0 < torch.cuda.device_count() < world:
        pytest.skip("vLLM wants a GPU for each rank where there is one")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ProcessPoolExecutor(world, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(check_rank, rank, world, port, tmp_path) for rank in range(world)]
        for rank in ranks:
            assert rank.result(timeout=120) == 2 * len(KINDS)


def check_rank(rank: int, world: int, port: int, folder: Path) -> int:
    """In a child: every kind of model with its head tied and untied; returns how many were checked."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    checked = 0
    for kind in KINDS:
        for tied in (False, True):
            hf_model, config = configured(kind, tied, world, folder / f"{kind}-{tied}-{rank}")
            with set_current_vllm_config(config):
                if not checked:
                    init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
                    initialize_model_parallel(world, 1)
                check(hf_model, config)
            checked += 1
    return checked


def configured(kind: str, tied: bool, world: int, folder: Path) -> tuple[torch.nn.Module, Any]:
    """A Hugging Face model, which names the tensors, and the vLLM configuration of the same."""
    import transformers
    from vllm.engine.arg_utils import EngineArgs

    hf_config = getattr(transformers, f"{kind}Config")(**SIZES, tie_word_embeddings=tied)
    hf_model = getattr(transformers, f"{kind}ForCausalLM")(hf_config)
    hf_config.architectures, hf_config.dtype = [type(hf_model).__name__], torch.bfloat16
    hf_config.save_pretrained(folder)
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", max_model_len=64, enforce_eager=True,
        tensor_parallel_size=world,
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.device_config.device_type = "cuda"  # what decides that layers stay as they are
    return hf_model, config


def check(hf_model: torch.nn.Module, config: Any) -> None:
    from vllm.model_executor.model_loader.utils import initialize_model

    from asyncrl.generation.copies import Copies
    from asyncrl.generation.vllm_worker import Loader

    models = []
    for _ in range(2):
        config.compilation_config.static_forward_context.clear()  # where a layer's name may be taken once
        models.append(initialize_model(vllm_config=config, model_config=config.model_config))
    expected, model = models
    copies = Copies(model, model.load_weights)
    for seed, how in ((0, "learnt"), (1, "repeated"), (2, "repeated")):
        tensors = weights(hf_model, seed)
        loader = Loader(config, copies)
        for start in range(0, len(tensors), BUCKET):
            bucket = tensors[start : start + BUCKET]
            loader.load(bucket)
            with torch.no_grad():
                expected.load_weights(bucket)
        loader.finish()
        assert copies.last == how
        for (name, ours), (_, theirs) in zip(everything(model), everything(expected), strict=True):
            assert torch.equal(ours, theirs), name
    short = Loader(config, copies)
    short.load(tensors[:BUCKET])
    with pytest.raises(RuntimeError, match="sent no weights for"):
        short.finish()


def weights(hf_model: torch.nn.Module, seed: int) -> Named:
    """Random values for each tensor of a checkpoint, a tied one under both its names."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    named = []
    for name, parameter in hf_model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
        named.append((name, made[id(parameter)]))
    first = {id(tensor): index for index, (_, tensor) in reversed(list(enumerate(named)))}
    return sorted(named, key=lambda pair: first[id(pair[1])])  # both names in one bucket, as the receiver has them


def everything(model: torch.nn.Module) -> Named:
    return [*model.named_parameters(), *model.named_buffers()]
