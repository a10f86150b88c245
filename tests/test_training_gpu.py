"""The training room on GPUs: each attention, bf16 log-probabilities, offload, two ranks over NCCL."""

import json
from pathlib import Path

import pytest
import torch
from test_training_logprobs import naive
from test_training_model import sequences
from test_training_step import batch
from training_helpers import config_for, make_learner, run_ranks, save_random_model

from asyncrl.algos.dapo import DAPO
from asyncrl.models import build_model
from asyncrl.training.attention import packed_input
from asyncrl.training.logprobs import chosen_logprobs
from asyncrl.training.model import load_policy, published
from asyncrl.training.packing import pack
from asyncrl.training.packing_check import check_packing
from asyncrl.training.ranks import join_ranks, leave_ranks, make_mesh

pytestmark = pytest.mark.gpu
BIG = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}


@pytest.fixture
def ranks():
    leave_ranks()
    yield join_ranks(with_gpus=True, timeout_s=60)
    leave_ranks()


def policy_of(path, ranks, kind, dtype="bfloat16"):
    config = config_for(path, dtype=dtype)
    config.model.attention = kind
    return load_policy(config, ranks, make_mesh(config.parallelism, ranks))


@pytest.mark.parametrize("architecture", ["Qwen3", "Llama"])
@pytest.mark.parametrize("kind", ["sdpa", "flash", "flex"])
def test_packed_attention_in_bf16_equals_fp32_unpacked_within_its_noise(tmp_path, ranks, architecture, kind):
    path = save_random_model(tmp_path, architecture, **BIG)
    policy = policy_of(path, ranks, kind)
    ids, trained = sequences()
    logprobs, _ = policy(packed_input(pack(ids, trained), "cuda", kind))
    model = build_model(path, dtype=torch.float32, device="cuda")
    rows = [torch.from_numpy(row)[None].cuda() for row in ids]
    expected = torch.cat(
        [torch.log_softmax(model(r).logits[0, :-1], -1).gather(1, r[0, 1:, None]).squeeze(1) for r in rows]
    )
    assert (logprobs - expected).abs().mean() < 0.2
    logprobs.sum().backward()
    expected.sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in policy.named_parameters():
        ours, theirs = parameter.grad.full_tensor().flatten(), wanted[name.removeprefix("lm.")].grad.flatten()
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.95, name
    check_packing(policy, ranks, dtype=torch.bfloat16)


def test_bf16_log_probabilities_accumulate_in_fp32():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(5000, 512, device="cuda", generator=generator)).bfloat16().requires_grad_()
    targets = torch.randint(0, 5000, (300,), device="cuda", generator=generator)
    logprobs, entropy = chosen_logprobs(hidden, weight, targets, entropy=True, chunk_tokens=128, chunk_vocabulary=1024)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected, expected_entropy = naive(*wide, None, targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-3)
    (logprobs.sum() + entropy.sum()).backward()
    (expected.sum() + expected_entropy.sum()).backward()
    for ours, theirs in zip((hidden, weight), wide, strict=True):
        assert torch.cosine_similarity(ours.grad.double().flatten(), theirs.grad.flatten(), dim=0) > 0.999


def test_the_full_logits_never_exist_on_the_gpu():
    tokens, width, vocabulary = 8192, 256, 151_936
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen_logprobs(hidden, weight, targets, entropy=True)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 0.5 * tokens * vocabulary * 4


@pytest.mark.parametrize("keys", [{}, {"cpu_offload": True}, {"activation_checkpointing": True}, {"compile": True}])
def test_a_step_trains_in_bf16(tmp_path, ranks, keys):
    config = config_for(save_random_model(tmp_path, "Qwen3", **BIG), dtype="bfloat16", learning_rate=1e-3, **keys)
    learner = make_learner(DAPO(), config, ranks)
    data = batch(learner.algo, config)
    rows = [learner.train(data, step=step) for step in range(1, 5)]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["optimizer/skipped"] == 0 for row in rows)
    assert all(p.dtype == torch.float32 for p in learner.policy.parameters())
    names = [name for name, tensor in published(learner.policy, torch.bfloat16) if tensor.dtype == torch.bfloat16]
    assert len(names) == len(list(learner.policy.parameters()))


SCRIPT = """
import sys
from test_training_gpu import two_ranks
two_ranks(sys.argv[1])
"""


def two_ranks(path):
    """What SCRIPT runs on each of two GPUs: a step, whose figures rank 0 writes."""
    ranks = join_ranks(with_gpus=True, timeout_s=60)
    config = config_for(path, tokens_per_micro_batch=64, learning_rate=1e-3)
    learner = make_learner(DAPO(), config, ranks)
    data = batch(learner.algo, config)
    row = learner.train(data, step=1)
    if ranks.is_first:
        Path(path, "row.json").write_text(json.dumps(row))
    leave_ranks()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_over_nccl_equal_one(tmp_path, ranks):
    path = save_random_model(tmp_path, "Qwen3", **BIG)
    run_ranks(SCRIPT, 2, path)
    learner = make_learner(DAPO(), config_for(path, tokens_per_micro_batch=10_000, learning_rate=1e-3), ranks)
    row = learner.train(batch(learner.algo, learner.config), step=1)
    other = json.loads((tmp_path / "row.json").read_text())
    for name in ("loss", "policy/grad_norm", "policy/entropy"):
        assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
