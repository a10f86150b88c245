"""KL penalties on a small softmax, every outcome enumerated: expected gradients against the analytic ones."""

from itertools import product

import pytest
import torch

from asyncrl.algorithm import Algorithm
from asyncrl.losses.kl import estimate, penalty
from asyncrl.types import Batch

torch.set_num_threads(1)
V = 5


def three_policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits of theta that want a gradient, log ref, log mu), (V,) each."""
    generator = torch.Generator().manual_seed(0)
    theta, ref, mu = (0.7 * torch.randn(3, V, generator=generator, dtype=torch.float64)).unbind()  # below k3's bound
    return theta.clone().requires_grad_(), ref.log_softmax(0), mu.log_softmax(0)


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]


def analytic(logits: torch.Tensor, ref: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
    """The gradient of KL(theta, ref), or of KL(ref, theta)."""
    theta = logits.log_softmax(0)
    kl = (ref.exp() * (ref - theta)).sum() if reverse else (theta.exp() * (theta - ref)).sum()
    return gradient(kl, logits)


def expected(name: str, *, sampled_from: str, unbiased: bool) -> torch.Tensor:
    """E[grad penalty] over tokens drawn from theta or mu."""
    logits, ref, mu = three_policies()
    theta = logits.log_softmax(0)
    behaviour = theta.detach() if sampled_from == "theta" else mu
    value = penalty(name, theta, ref, behaviour, unbiased=unbiased)
    return gradient((behaviour.exp() * value).sum(), logits)


def test_k1_as_a_loss_has_zero_expected_gradient():
    assert expected("k1", sampled_from="theta", unbiased=False).abs().max() < 1e-15


def test_k2_as_a_loss_has_the_gradient_of_the_kl_on_policy():
    logits, ref, _ = three_policies()
    torch.testing.assert_close(expected("k2", sampled_from="theta", unbiased=False), analytic(logits, ref))


def test_k3_as_a_loss_has_the_gradient_of_the_reverse_kl():
    logits, ref, _ = three_policies()
    found = expected("k3", sampled_from="theta", unbiased=False)
    torch.testing.assert_close(found, analytic(logits, ref, reverse=True))
    assert (found - analytic(logits, ref)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampled_from", ["theta", "mu"])
def test_unbiased_estimators_have_the_gradient_of_the_kl_on_and_off_policy(name, sampled_from):
    logits, ref, _ = three_policies()
    torch.testing.assert_close(expected(name, sampled_from=sampled_from, unbiased=True), analytic(logits, ref))


def test_plain_estimators_are_wrong_off_policy():
    logits, ref, _ = three_policies()
    for name in ("k2", "k3"):
        assert (expected(name, sampled_from="mu", unbiased=False) - analytic(logits, ref)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expected_values_are_the_kl(name):
    logits, ref, _ = three_policies()
    theta = logits.detach().log_softmax(0)
    found = (theta.exp() * estimate(name, theta, ref)).sum()
    assert found.item() == pytest.approx((theta.exp() * (theta - ref)).sum().item())


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_whole_responses():
    """Two tokens, the second conditioned on the first: all V^2 responses, with the loss that the engine would run."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((V,), (V, V)))
    ref1, ref2 = (torch.randn(*s, generator=generator, dtype=torch.float64).log_softmax(-1) for s in ((V,), (V, V)))
    logits = [first.requires_grad_(), second.requires_grad_()]
    log1, log2 = (x.log_softmax(-1) for x in logits)
    joint, ref = log1[:, None] + log2, ref1[:, None] + ref2
    wanted = torch.autograd.grad((joint.exp() * (joint - ref)).sum(), logits, retain_graph=True)

    responses = list(product(range(V), range(V)))
    logprobs_T = torch.stack([lp for a, b in responses for lp in (log1[a], log2[a, b])])
    reference_T = torch.stack([r for a, b in responses for r in (ref1[a], ref2[a, b])])
    zeros_T = torch.zeros_like(reference_T)
    batch = Batch(
        behaviour_T=logprobs_T.detach(),
        reference_T=reference_T,
        advantages_T=zeros_T,
        rewards_T=zeros_T,
        lags_T=torch.zeros(len(zeros_T), dtype=torch.int64),
        sequence_T=torch.arange(len(responses)).repeat_interleave(2),
        num_sequences=len(responses),
        weights_T=joint.detach().exp().flatten().repeat_interleave(2),
    )
    algo = Algorithm(objective="reinforce", beta=0.3, kl_in="reward", aggregation="sequence_sum")
    loss_T, metrics = algo.loss(logprobs_T, batch)
    found = torch.autograd.grad((loss_T * batch.weights_T).sum(), logits)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, 0.3 * theirs)
    assert (metrics["policy/kl_ref"] * batch.weights_T).sum() > 0
