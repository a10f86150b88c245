"""Models and tokenizers by path: a Hugging Face folder, a hub name, or `tiny`, which is built on the spot.

The trainer, the local engine and the evaluation call this, so all of them mean the same model by the same path. It
never trains, shards or moves anything between processes.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TINY = "tiny"
PAD, BOS, EOS, UNKNOWN = "<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"
CHARACTERS = string.ascii_lowercase + string.digits + " \n" + "+-*/=()<>,.:?!"
TINY_POSITIONS = 2048


def build_model(
    path: str, *, dtype: torch.dtype, device: torch.device | str = "cpu", weights: bool = True, seed: int = 0
) -> PreTrainedModel:
    """A causal LM in eval mode. `weights=False` leaves parameters uninitialised (they will be received or loaded).

    `seed` matters for `tiny` alone: the same seed gives the same initial weights. `device="meta"` needs
    `weights=False` and allocates nothing. Raises ValueError when there is no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if not weights:
        return _empty_model(load_config(path), dtype=dtype, device=device)
    if path == TINY:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(load_config(path), dtype=torch.float32)
        return _placed(model, dtype=dtype, device=device)
    try:
        return _placed(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), dtype=dtype, device=device)
    except OSError as error:
        raise ValueError(_not_found(path, error)) from error


def load_config(path: str) -> PreTrainedConfig:
    """The model's configuration: its structure without weights. Raises ValueError when there is none."""
    from transformers import AutoConfig

    if path == TINY:
        return tiny_config()
    try:
        return AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(_not_found(path, error)) from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ValueError when there is none."""
    from transformers import AutoTokenizer

    if path == TINY:
        return tiny_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise ValueError(_not_found(path, error)) from error


def _placed(model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    import torch

    torch.nn.Module.to(model, device, dtype)  # transformers wraps its own `to` without a signature
    return model.eval()


def _not_found(path: str, error: OSError) -> str:
    reason = str(error).strip().splitlines()[0]
    return f"model.path {path!r}: {reason} (give a Hugging Face folder, a hub name, or {TINY!r})"


def _empty_model(config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # Built on the device itself, not on meta: buffers that no checkpoint holds (rotary frequencies) are computed.
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval()


def tiny_config() -> PreTrainedConfig:
    """Qwen3 architecture, 0.4M parameters, one token per character."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(CHARACTERS) + 4,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=TINY_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Characters as tokens; the special tokens contain `|`, which is no token, so text cannot spell them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=TINY_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the tiny model and its tokenizer as an ordinary Hugging Face folder; returns the folder."""
    import torch

    build_model(TINY, dtype=torch.float32, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
