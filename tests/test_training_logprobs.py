"""Chunked log-probabilities against the naive formula in float64, values and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.training.logprobs import chosen_logprobs

torch.set_num_threads(1)


def naive(hidden, weight, bias, targets, temperature):
    logits = hidden @ weight.T + (bias if bias is not None else 0.0)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def make(seed, tokens, width, vocabulary, *, with_bias, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(tokens, width, generator=g)).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g).requires_grad_()
    bias = torch.randn(vocabulary, generator=g).requires_grad_() if with_bias else None
    return hidden, weight, bias, torch.randint(0, vocabulary, (tokens,), generator=g)


def double(tensor):
    return None if tensor is None else tensor.detach().double().requires_grad_()


@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 20),
    vocabulary=st.integers(1, 50),
    chunk_tokens=st.integers(1, 25),
    chunk_vocabulary=st.integers(1, 60),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_the_naive_float64_formula(
    seed, tokens, vocabulary, chunk_tokens, chunk_vocabulary, temperature, with_bias
):
    hidden, weight, bias, targets = make(seed, tokens, 6, vocabulary, with_bias=with_bias)
    logprobs, entropy = chosen_logprobs(
        hidden, weight, targets, bias_V=bias, temperature=temperature, entropy=True,
        chunk_tokens=chunk_tokens, chunk_vocabulary=chunk_vocabulary,
    )  # fmt: skip
    wide = [double(t) for t in (hidden, weight, bias)]
    expected, expected_entropy = naive(*wide, targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    g = torch.Generator().manual_seed(seed + 1)
    a, b = torch.randn(tokens, generator=g), torch.randn(tokens, generator=g)
    ((logprobs * a).sum() + (entropy * b).sum()).backward()
    ((expected * a).sum() + (expected_entropy * b).sum()).backward()
    for ours, theirs in zip((hidden, weight, bias), wide, strict=True):
        if ours is not None:
            rounding = 1e-5 * max(1.0, theirs.grad.abs().max().item())  # of a sum of terms as large as the largest
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=rounding)


def test_extreme_logits_stay_finite():
    hidden, weight, _, targets = make(0, 8, 6, 30, with_bias=False, scale=300.0)
    logprobs, entropy = chosen_logprobs(hidden, weight, targets, entropy=True, chunk_vocabulary=7)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(t.isfinite().all() for t in (logprobs, entropy, hidden.grad, weight.grad))
    assert (entropy >= 0).all()


def test_no_token_gives_zero_gradients():
    hidden, weight, _, _ = make(0, 3, 6, 30, with_bias=False)
    logprobs, entropy = chosen_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert entropy is None
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0
    assert hidden.grad.abs().max() == 0


def test_a_frozen_output_layer_gets_no_gradient():
    hidden, weight, _, targets = make(0, 3, 6, 30, with_bias=False)
    logprobs, _ = chosen_logprobs(hidden, weight.detach(), targets)
    logprobs.sum().backward()
    assert hidden.grad.abs().max() > 0


def test_half_precision_inputs_give_fp32_results():
    hidden, weight, _, targets = make(0, 5, 16, 40, with_bias=False)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    logprobs, _ = chosen_logprobs(*low, targets, chunk_vocabulary=16)
    assert logprobs.dtype == torch.float32
    expected, _ = naive(*(t.detach().double() for t in low), None, targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert low[0].grad.dtype == torch.bfloat16


def test_the_full_logits_never_exist():
    """Peak of any tensor allocated inside forward and backward stays at one chunk."""
    tokens, vocabulary = 64, 4096
    hidden, weight, _, targets = make(0, tokens, 4, vocabulary, with_bias=False)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        logprobs, _ = chosen_logprobs(hidden, weight, targets, chunk_tokens=16, chunk_vocabulary=256)
        logprobs.sum().backward()
    assert largest <= max(16 * 256, vocabulary * 4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_chunk_sizes_do_not_matter(temperature):
    hidden, weight, _, targets = make(3, 33, 6, 90, with_bias=False)
    whole, _ = chosen_logprobs(hidden, weight, targets, temperature=temperature)
    cut, _ = chosen_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=5, chunk_vocabulary=11)
    torch.testing.assert_close(whole, cut, rtol=1e-6, atol=1e-6)
