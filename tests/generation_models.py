"""Small models of three architectures, and the plain full forward that the engine is compared with."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from asyncrl.models import tiny_config

VOCABULARY = 56
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "qwen3": tiny_config(),
    "llama": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, **TOKENS,
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512, **TOKENS),
}  # fmt: skip


def make_model(name: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with weights large enough that its distributions are far from uniform and attention matters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.12)
    return model.to(dtype).eval()


@torch.inference_mode()
def full_logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities of `tokens` after `prompt`, from one forward pass without a cache; float32 (T,)."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / (temperature or 1.0)).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
