"""Logits of vLLM in float32: the head of an older vLLM, on whatever device there is, and what becomes of big logits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncrl.generation.vllm_logits import wide_product, widen_head


class UnquantizedEmbeddingMethod:
    """By its name, as the worker knows it."""

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)


class Head(nn.Module):
    def __init__(self, dtype, device="cpu", method=UnquantizedEmbeddingMethod):
        super().__init__()
        self.quant_method = method()
        self.weight = nn.Parameter(torch.randn(50, 64, dtype=dtype, device=device) * 8)


def exact(x, head):
    return x.double() @ head.weight.double().t()


def error(logits, x, head):
    return float((logits.double() - exact(x, head)).detach().abs().max())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_widened_head_gives_what_bfloat16_would_have_rounded(device):
    torch.manual_seed(0)
    head, x = Head(torch.bfloat16, device), torch.randn(3, 5, 64, dtype=torch.bfloat16, device=device)
    rounded = error(head.quant_method.apply(head, x), x, head)
    assert widen_head(nn.Sequential(head)) == 1
    logits = head.quant_method.apply(head, x)
    assert logits.shape == (3, 5, 50)
    assert logits.dtype == torch.float32
    assert error(logits, x, head) < rounded / 100
    bias = torch.randn(50, dtype=torch.bfloat16, device=device)
    torch.testing.assert_close(head.quant_method.apply(head, x, bias=bias), logits + bias.float())


def test_a_float32_head_and_a_quantised_one_stay_as_they_are():
    heads = nn.Sequential(Head(torch.float32), Head(torch.bfloat16, method=SimpleNamespace))
    assert widen_head(heads) == 0


def test_other_layers_of_the_same_method_class_are_separate():
    one, other = Head(torch.bfloat16), Head(torch.float32)
    widen_head(nn.Sequential(one, other))
    assert one.quant_method.apply is wide_product
    assert other.quant_method.apply(other, torch.ones(1, 64)).dtype == torch.float32
