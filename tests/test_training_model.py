"""The policy: packed equals unpacked, for several architectures, and what cannot work is refused at the start."""

import numpy as np
import pytest
import torch
from training_helpers import config_for, lone_policy, lone_rank, save_random_model

from asyncrl.config import ParallelismConfig
from asyncrl.models import build_model
from asyncrl.training.attention import flex, make_layout, packed_input, sdpa
from asyncrl.training.model import choose_attention, published
from asyncrl.training.packing import pack
from asyncrl.training.packing_check import check_packing
from asyncrl.training.ranks import make_mesh

LENGTHS = (9, 3, 17, 2, 1, 16, 8)


def sequences(vocabulary=50):
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, vocabulary, n) for n in LENGTHS]
    return ids, [np.arange(n) > 0 for n in LENGTHS]


def unpacked(path, ids, temperature=1.0):
    model = build_model(path, dtype=torch.float32)
    total = []
    for row in ids:
        row = torch.from_numpy(row)[None]
        log_p = torch.log_softmax(model(row).logits[0, :-1] / temperature, -1)
        total.append(log_p.gather(1, row[0, 1:, None]).squeeze(1))
    return model, torch.cat(total)


CASES = [
    ("Qwen3", {}),
    ("Qwen3", {"tie_word_embeddings": True}),
    ("Llama", {}),
    ("Mistral", {"sliding_window": 5}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
]


@pytest.mark.parametrize(("architecture", "overrides"), CASES)
def test_packed_forward_and_gradients_equal_unpacked_ones(tmp_path, architecture, overrides):
    path = save_random_model(tmp_path, architecture, **overrides)
    policy = lone_policy(config_for(path))
    ids, trained = sequences()
    packed = packed_input(pack(ids, trained), "cpu")
    ours, entropy = policy(packed, temperature=0.8, entropy=True)
    model, theirs = unpacked(path, ids, temperature=0.8)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert entropy.shape == ours.shape
    ours.sum().backward()
    theirs.sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in policy.named_parameters():
        expected = wanted[name.removeprefix("lm.")]
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max())


def test_flex_and_sdpa_attend_alike():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 16, generator=generator) for heads in (4, 2, 2))
    module = torch.nn.Identity()
    outputs = [
        attend(module, query, key, value, None, layout=make_layout(np.array(LENGTHS), "cpu", kind))[0]
        for attend, kind in ((sdpa, "sdpa"), (flex, "flex"))
    ]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_feel_its_neighbours():
    policy = lone_policy(config_for())
    ids, trained = sequences()
    together, _ = policy(packed_input(pack(ids, trained), "cpu"))
    changed = [ids[0], *((row + 1) % 50 for row in ids[1:])]
    other, _ = policy(packed_input(pack(changed, trained), "cpu"))
    torch.testing.assert_close(together[:8], other[:8], rtol=0, atol=1e-6)


def test_an_empty_micro_batch_runs_and_gives_zero_gradients():
    policy = lone_policy(config_for())
    logprobs, _ = policy(packed_input(pack([], []), "cpu"))
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad.full_tensor().abs().max() == 0 for p in policy.parameters())


def test_activation_checkpointing_changes_no_gradient():
    ids, trained = sequences()
    gradients = []
    for checkpointing in (False, True):
        policy = lone_policy(config_for(activation_checkpointing=checkpointing))
        policy(packed_input(pack(ids, trained), "cpu"))[0].sum().backward()
        gradients.append([p.grad.full_tensor() for p in policy.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_published_weights_load_into_a_fresh_model(tmp_path):
    path = save_random_model(tmp_path, "Qwen3", tie_word_embeddings=True)
    policy = lone_policy(config_for(path))
    state = {name: tensor.full_tensor() for name, tensor in published(policy, torch.float32)}
    assert "lm_head.weight" not in state
    fresh = build_model(path, dtype=torch.float32, weights=False)
    missing, unexpected = fresh.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    fresh.tie_weights()
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(fresh(ids).logits, build_model(path, dtype=torch.float32)(ids).logits)


def test_adapters_train_alone_and_are_published_merged(tmp_path):
    path = save_random_model(tmp_path, "Llama")
    config = config_for(path)
    config.training.lora.rank, config.training.lora.alpha = 4, 8.0
    policy = lone_policy(config)
    ids, trained = sequences()
    packed = packed_input(pack(ids, trained), "cpu")
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        policy(packed)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = policy(packed)[0].detach()
    state = {name: tensor.full_tensor() for name, tensor in published(policy, torch.float32)}
    fresh, before = unpacked(path, ids)
    assert set(state) == {name for name, _ in fresh.named_parameters()}
    fresh.load_state_dict(state)
    moved = torch.cat(
        [torch.log_softmax(fresh(torch.from_numpy(r)[None]).logits[0, :-1], -1)[range(len(r) - 1), r[1:]] for r in ids]
    )
    torch.testing.assert_close(after, moved, rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 1e-3


def test_leaky_layers_are_refused():
    config = build_model("tiny", dtype=torch.float32, weights=False).config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="leak between packed sequences"):
        choose_attention("auto", config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["flash", "flex"])
def test_gpu_attention_on_a_cpu_is_refused(kind):
    config = build_model("tiny", dtype=torch.float32, weights=False).config
    with pytest.raises(ValueError, match="needs a GPU"):
        choose_attention(kind, config, torch.float32, torch.device("cpu"))


def test_tensor_parallel_training_is_refused():
    with pytest.raises(ValueError, match="tensor_parallel_degree"):
        make_mesh(ParallelismConfig(tensor_parallel_degree=2), lone_rank())


def test_degrees_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(ValueError, match="number of trainer ranks, 1"):
        make_mesh(ParallelismConfig(data_parallel_replicate_degree=2), lone_rank())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_packs_well_passes_the_check_at_the_start(dtype):
    check_packing(lone_policy(config_for(dtype=dtype)), lone_rank(), dtype=getattr(torch, dtype))


def test_a_model_whose_tokens_see_across_the_boundary_is_refused_at_the_start(tmp_path):
    policy = lone_policy(config_for(save_random_model(tmp_path, "Llama")))
    norm = policy.lm.base_model.norm

    class Leaky(torch.nn.Module):
        def forward(self, hidden):
            return norm(hidden + hidden.cumsum(1))

    policy.lm.base_model.norm = Leaky()
    with pytest.raises(ValueError, match="see across the boundary"):
        check_packing(policy, lone_rank(), dtype=torch.float32)


def test_a_model_that_keeps_the_layout_to_itself_is_refused():
    heads = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="gets no packing layout"):
        sdpa(torch.nn.Identity(), heads, heads, heads, None)
