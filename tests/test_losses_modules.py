"""Losses as nn.Modules: what the ready-made ones compute, and how any module becomes an algorithm."""

import math

import numpy as np
import pytest
import torch
from losses_helpers import make_batch, random_sequences
from torch import nn

from asyncrl.algorithm import as_algorithm
from asyncrl.losses.aggregation import token_weights
from asyncrl.losses.modules import ReinforceLoss, SimpleGRPOLoss, masked_mean

torch.set_num_threads(1)


def padded(seed: int = 0, *, fill: float = 0.0):
    """(sequences, logprobs, ref_logprobs, advantages (B,), mask), float64; `fill` is what lies under the mask."""
    sequences = random_sequences(seed, num=5)
    longest = max(len(s.theta) for s in sequences) + 1

    def pad(name: str) -> torch.Tensor:
        return torch.tensor([getattr(s, name) + [fill] * (longest - len(s.theta)) for s in sequences]).double()

    mask = torch.tensor([[1.0] * len(s.theta) + [0.0] * (longest - len(s.theta)) for s in sequences])
    return sequences, pad("theta").requires_grad_(), pad("ref"), torch.tensor([s.advantage for s in sequences]), mask


def test_simple_grpo_equals_the_loops():
    sequences, logprobs, ref, advantages, mask = padded()
    rows = []
    for s in sequences:
        penalties = [math.exp(r - p) - (r - p) - 1 for p, r in zip(s.theta, s.ref, strict=True)]
        rows.append(sum(0.3 * k - s.advantage for k in penalties) / len(penalties))
    loss = SimpleGRPOLoss(beta=0.3)(logprobs, ref, advantages, mask)
    assert loss.item() == pytest.approx(sum(rows) / len(rows))
    SimpleGRPOLoss(beta=0.0)(logprobs, ref, advantages, mask).backward()
    wanted = -advantages[:, None] * mask / (mask.sum(1, keepdim=True) * len(sequences))
    torch.testing.assert_close(logprobs.grad, wanted.double())


def test_reinforce_equals_the_loops():
    sequences, logprobs, ref, advantages, mask = padded(3)
    total, count = 0.0, 0
    for s in sequences:
        for p, r in zip(s.theta, s.ref, strict=True):
            total -= min(max(math.exp(p - r), 0.8), 1.2) * s.advantage * p
            count += 1
    loss = ReinforceLoss(clip_ratio=0.2)(logprobs, ref, advantages, mask)
    assert loss.item() == pytest.approx(total / count)


@pytest.mark.parametrize("module", [SimpleGRPOLoss(), ReinforceLoss()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("fill", [math.nan, -math.inf, 1e4])
def test_what_lies_under_the_padding_mask_changes_nothing(module, fill):
    found = []
    for value in (0.0, fill):
        _, logprobs, ref, advantages, mask = padded(fill=value)
        loss = module(logprobs, ref, advantages, mask)
        loss.backward()
        found.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("module", [SimpleGRPOLoss(), ReinforceLoss()], ids=lambda m: type(m).__name__)
def test_advantages_may_be_per_response_or_per_token(module):
    _, logprobs, ref, advantages, mask = padded()
    shapes = [advantages, advantages[:, None], advantages[:, None].expand_as(mask)]
    values = [module(logprobs, ref, a, mask).item() for a in shapes]
    assert values == pytest.approx([values[0]] * 3)


@pytest.mark.parametrize("module", [SimpleGRPOLoss(), ReinforceLoss()], ids=lambda m: type(m).__name__)
def test_an_empty_mask_gives_zero_and_no_gradient(module):
    _, logprobs, ref, advantages, mask = padded()
    loss = module(logprobs, ref, advantages, mask * 0)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logprobs.grad, torch.zeros_like(logprobs))


def test_masked_mean_ignores_nan_under_the_mask():
    values = torch.tensor([[1.0, math.nan], [3.0, 5.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    assert masked_mean(values, mask).item() == 3
    assert masked_mean(values, mask, dim=1).tolist() == [1, 4]


@pytest.mark.parametrize("cls", [SimpleGRPOLoss, ReinforceLoss])
def test_a_module_gives_the_same_gradient_packed_padded_and_cut(cls):
    """The plain means of both are put together exactly from micro-batches."""
    algo = as_algorithm(cls)()
    sequences, logprobs, _, advantages, mask = padded()
    source = "ref" if algo.needs().reference else "mu"
    other = torch.zeros_like(logprobs)
    for i, s in enumerate(sequences):
        other[i, : len(s.mu)] = torch.tensor(getattr(s, source)).double()
    cls()(logprobs, other, advantages, mask).backward()
    wanted_T = logprobs.grad[mask.bool()]

    weights_B = token_weights(algo.aggregation, np.array([len(s.theta) for s in sequences]), 16)
    found = []
    for part in ([0, 1], [2], [3, 4]):
        logprobs_T, batch = make_batch([sequences[i] for i in part], algo.aggregation, weights_B=weights_B[part])
        if source == "mu":
            batch.reference_T = None
        (algo.loss(logprobs_T, batch)[0] * batch.weights_T).sum().backward()
        found.append(logprobs_T.grad)
    torch.testing.assert_close(torch.cat(found), wanted_T)


class Margin(nn.Module):
    """A loss of a user's."""

    def __init__(self, margin: float = 0.1, flavour="plain"):
        super().__init__()
        self.margin, self.flavour = margin, flavour

    def forward(self, logprobs, ref_logprobs, advantages, padding_mask):
        assert self.flavour == "plain"
        return masked_mean((self.margin - advantages * (logprobs - ref_logprobs)).clamp(min=0), padding_mask)


def test_parameters_of_a_module_are_the_algorithms_keys():
    cls = as_algorithm(Margin)
    assert as_algorithm(Margin) is cls, "one class, however often it is asked for"
    algo = cls(margin=0.5, n_samples=4)
    assert (algo.margin, algo.flavour, algo.n_samples, algo.aggregation) == (0.5, "plain", 4, "token_mean")
    logprobs_T, batch = make_batch(random_sequences(0), "token_mean")
    batch.reference_T = None
    loss_T, _ = algo.loss(logprobs_T, batch)
    expected = (0.5 - batch.advantages_T * (logprobs_T - batch.behaviour_T)).clamp(min=0).mean()
    torch.testing.assert_close((loss_T * batch.weights_T).sum(), expected)


def test_ref_logprobs_are_the_reference_only_when_beta_asks_for_one():
    assert as_algorithm(SimpleGRPOLoss)().needs().reference
    assert not as_algorithm(SimpleGRPOLoss)(beta=0.0).needs().reference
    assert not as_algorithm(ReinforceLoss)().needs().reference


class NeedsMore(nn.Module):
    def __init__(self, margin):
        super().__init__()

    def forward(self, logprobs, ref_logprobs, advantages, padding_mask):
        return logprobs.sum()


class PerToken(nn.Module):
    def forward(self, logprobs, ref_logprobs, advantages, padding_mask):
        return logprobs


def test_a_parameter_without_a_default_is_refused():
    with pytest.raises(ValueError, match="parameter 'margin' needs a default"):
        as_algorithm(NeedsMore)


def test_a_module_that_does_not_reduce_is_refused():
    with pytest.raises(ValueError, match="must return a scalar loss, got shape"):
        as_algorithm(PerToken)().loss(*make_batch(random_sequences(0), "token_mean"))


def test_a_class_that_is_neither_is_refused():
    with pytest.raises(ValueError, match=r"an Algorithm or an nn\.Module class"):
        as_algorithm(dict)
