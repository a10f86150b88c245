"""Sampling: a counter-based uniform number, turned into a token by the inverse CDF."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generation.sampling import sample, uniform

u64 = st.integers(0, 2**64 - 1)


def splitmix(seed: int, index: int) -> float:
    """The same in plain integers."""
    mask = 2**64 - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    return (mix((mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) & mask) >> 11) * 2.0**-53


@given(seed=u64, index=st.integers(0, 2**40))
def test_uniform_numbers_equal_the_integer_formula_and_lie_below_one(seed, index):
    (number,) = uniform(np.array([seed], np.uint64), np.array([index]))
    assert number == splitmix(seed, index)
    assert 0 <= number < 1


def test_uniform_numbers_of_neighbouring_seeds_and_indices_are_uniform_and_uncorrelated():
    seeds, indices = np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200)
    table = uniform(seeds.astype(np.uint64), indices).reshape(200, 200)
    assert np.abs(np.histogram(table, bins=20, range=(0, 1))[0] / 2000 - 1).max() < 0.1
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


@given(u=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 1000), temperature=st.sampled_from([0.3, 1.0, 2.0]))
def test_the_token_is_where_the_cumulative_distribution_passes_the_number(u, seed, temperature):
    logits = torch.randn(1, 56, generator=torch.Generator().manual_seed(seed)) * 4
    token, logprob = sample(logits, torch.tensor([temperature]), torch.tensor([u], dtype=torch.float64))
    p = (logits[0].double() / temperature).softmax(-1).numpy()
    cdf = p.cumsum()
    at = int(token[0])
    assert (cdf[at - 1] if at else 0) - 1e-6 <= u <= cdf[at] + 1e-6
    assert abs(float(logprob[0]) - np.log(p[at])) < 1e-5


def test_a_token_without_probability_is_never_sampled():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]]).repeat(4, 1)
    u = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.ones(4), u)
    assert tokens.tolist() == [1, 1, 3, 3]
    torch.testing.assert_close(logprobs, torch.full((4,), -np.log(2.0), dtype=torch.float32))


def test_temperature_zero_takes_the_likeliest_token_with_its_untempered_logprob():
    logits = torch.randn(16, 56, generator=torch.Generator().manual_seed(1)) * 3
    tokens, logprobs = sample(logits, torch.zeros(16), torch.rand(16, dtype=torch.float64))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


def test_rows_do_not_depend_on_each_other_bit_for_bit():
    g = torch.Generator().manual_seed(2)
    for vocabulary in (56, 101, 5003):
        logits = torch.randn(64, vocabulary, generator=g) * 3
        temperature, u = torch.rand(64, generator=g) + 0.5, torch.rand(64, generator=g, dtype=torch.float64)
        tokens, logprobs = sample(logits, temperature, u)
        for rows in (slice(5, 6), slice(0, 3), slice(7, 40), slice(13, 64)):
            some_tokens, some_logprobs = sample(logits[rows], temperature[rows], u[rows])
            assert torch.equal(tokens[rows], some_tokens)
            assert torch.equal(logprobs[rows], some_logprobs)


def test_a_number_survives_reduced_precision_of_the_model():
    logits = (torch.randn(8, 56) * 3).bfloat16()
    _, logprobs = sample(logits, torch.ones(8), torch.rand(8, dtype=torch.float64))
    assert logprobs.dtype == torch.float32
