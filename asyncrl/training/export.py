"""The policy as an ordinary Hugging Face folder, adapters merged, that transformers and vLLM load; and the adapters
alone, as peft and vLLM load them onto the base model.

Called by the trainer at the end of a run, after the supervised warm-up and by `asyncrl sft`. Collective over the ranks:
each weight is gathered by all and kept by rank 0 alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from asyncrl.config import LoraConfig
from asyncrl.models import TINY, build_model
from asyncrl.training import lora
from asyncrl.training.model import Policy, published, reshard
from asyncrl.training.ranks import Ranks

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


def export(
    policy: Policy, folder: Path, *, path: str, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, ranks: Ranks
) -> None:
    """Write weights, configuration and tokenizer to `folder`, replacing it. `path` is the model it came from."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in published(policy, dtype):
        whole = lora.whole(tensor)
        if ranks.is_first:
            state[name] = whole.cpu()
    if ranks.is_first:
        _write(state, folder, path=path, tokenizer=tokenizer, dtype=dtype)
    ranks.barrier()


def export_adapter(policy: Policy, folder: Path, *, path: str, config: LoraConfig, ranks: Ranks) -> None:
    """Write the adapters, in fp32 as they are trained, and peft's configuration to `folder`, replacing it.

    `path` is the model they belong on, which is left as it was.
    """
    reshard(policy)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in policy.lm.named_parameters():
        if lora.is_factor(name):
            whole = lora.whole(parameter.detach())
            if ranks.is_first:
                state[lora.peft_name(name)] = whole.float().cpu().contiguous()
    if ranks.is_first:
        base = str(Path(path).absolute()) if Path(path).is_dir() else path
        with _replacing(folder) as temporary:
            save_file(state, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
            # vLLM knows no `all-linear`, so the modules that it found are named.
            modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in state})
            lora.peft_config(config, modules=modules, base=base).save_pretrained(str(temporary))
    ranks.barrier()


def _generation_config(path: str) -> GenerationConfig | None:
    """How the original is sampled (its end tokens, for one); None when it says nothing."""
    from transformers import GenerationConfig

    if path == TINY:
        return None
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def _write(
    state: dict[str, torch.Tensor], folder: Path, *, path: str, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> None:
    model = build_model(path, dtype=dtype, weights=False)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    assert not unexpected, unexpected
    assert set(missing) <= tied, missing
    model.tie_weights()
    model.generation_config = _generation_config(path) or model.generation_config
    with _replacing(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when all is in it."""
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    for file in temporary.iterdir():
        file.chmod(0o644)  # the weights come out as 0600: a model that is copied elsewhere is for others to serve
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
