"""Hidden states -> log-probability (and exact entropy) of chosen tokens, without ever holding all logits.

Called inside the policy's forward (model.py), where FSDP has the output weight whole. Forward and backward go over
tokens and vocabulary in chunks; the backward pass computes each chunk of logits again. All after the product is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 4096
CHUNK_VOCABULARY = 16384
"""4096 x 16384 fp32 values: a chunk of logits takes 256 MiB at most."""


def chosen_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    chunk_vocabulary: int = CHUNK_VOCABULARY,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((h W^T + b) / temperature)[target] per token, fp32 (T,), and the entropy of that softmax, if asked.

    Both are differentiable with respect to hidden states, weight and bias.
    """
    logprobs_T, entropy_T = _ChosenLogprobs.apply(
        hidden_TH, weight_VH, bias_V, targets_T, temperature, entropy, (chunk_tokens, chunk_vocabulary)
    )
    return logprobs_T, entropy_T if entropy else None


class _ChosenLogprobs(torch.autograd.Function):
    """Streaming softmax over vocabulary chunks. With z the tempered logits, p their softmax and H its entropy:
    d logprob / d z_j = [j = target] - p_j,  d H / d z_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        chunks: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_z, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for t in _slices(len(hidden), chunks[0]):
            log_z[t], chosen, entropies[t] = _stream(
                hidden[t], weight, bias, targets[t], temperature, entropy, chunks[1]
            )
            logprobs[t] = chosen - log_z[t]
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropies)
        ctx.temperature, ctx.chunks = temperature, chunks
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_z, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = _zeros(hidden) if needs_hidden else None
        grad_weight = _zeros(weight) if needs_weight else None
        grad_bias = _zeros(bias) if needs_bias and bias is not None else None
        for t in _slices(len(hidden), ctx.chunks[0]):
            for v in _slices(len(weight), ctx.chunks[1]):
                log_p = _tempered(hidden[t], weight[v], _part(bias, v), ctx.temperature).sub_(log_z[t, None])
                grad = _logit_gradient(
                    log_p, targets[t], v, entropies[t], _part(grad_logprobs, t), _part(grad_entropy, t)
                )
                grad = grad.div_(ctx.temperature)
                if grad_hidden is not None:
                    grad_hidden[t] += _product(grad, weight[v])
                if grad_weight is not None:
                    grad_weight[v] += _product(grad.t(), hidden[t])
                if grad_bias is not None:
                    grad_bias[v] += grad.sum(0)
        return _like(grad_hidden, hidden), _like(grad_weight, weight), _like(grad_bias, bias), None, None, None, None


def _stream(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, entropy: bool, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log normaliser, chosen logit and entropy of one chunk of tokens, by one pass over the vocabulary."""
    top = torch.full((len(hidden),), -torch.inf, dtype=torch.float32, device=hidden.device)
    total, weighted, chosen = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
    for v in _slices(len(weight), chunk):
        logits = _tempered(hidden, weight[v], _part(bias, v), temperature)
        inside = (targets >= v.start) & (targets < v.stop)
        local = (targets - v.start).clamp(0, v.stop - v.start - 1)
        chosen = torch.where(inside, logits.gather(1, local[:, None]).squeeze(1), chosen)
        new_top = torch.maximum(top, logits.amax(1))
        shift = torch.where(top.isfinite(), top - new_top, torch.zeros_like(top))
        logits = logits.sub_(new_top[:, None])
        exponentials = logits.exp()
        if entropy:  # sum of e^(z - top) (z - top), carried over to the new top
            weighted = shift.exp() * (weighted + shift * total) + (exponentials * logits).sum(1)
        total = shift.exp() * total + exponentials.sum(1)
        top = new_top
    return top + total.log(), chosen, total.log() - weighted / total if entropy else torch.zeros_like(top)


def _logit_gradient(
    log_p: Tensor, targets: Tensor, v: slice, entropy: Tensor, grad_logprob: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient with respect to one chunk of tempered logits."""
    p = log_p.exp()
    grad = torch.zeros_like(p)
    if grad_logprob is not None:
        grad.sub_(p * grad_logprob[:, None])
        rows = ((targets >= v.start) & (targets < v.stop)).nonzero().squeeze(1)
        grad[rows, targets[rows] - v.start] += grad_logprob[rows]
    if grad_entropy is not None:
        grad.sub_(p * (log_p + entropy[:, None]) * grad_entropy[:, None])
    return grad


def _tempered(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """One chunk of logits divided by the temperature, fp32."""
    logits = _product(hidden, weight.t())
    if bias is not None:
        logits += bias.float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b accumulated and returned in fp32. bf16 tensor cores do that on a GPU; on a CPU the operands are widened."""
    if b.is_cuda and b.dtype != torch.float32:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _slices(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


def _part(tensor: Tensor | None, where: slice) -> Tensor | None:
    return None if tensor is None else tensor[where]


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)


def _like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """The gradient in its tensor's type, as autograd expects it."""
    return None if gradient is None or tensor is None else gradient.to(tensor.dtype)
