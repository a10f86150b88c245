"""New weights between two tokens: versions, log-probabilities and the KV cache as it was served."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from generation_models import CONFIGS, full_logprobs, make_model
from test_generation_local import complete, prompts, request, same, serve

from asyncrl.generation.local import LocalEngine

torch.set_num_threads(1)


def weights(name: str, seed: int):
    return list(make_model(name, seed=seed).named_parameters())


async def until(engine: LocalEngine, tokens: int) -> None:
    """Wait until the engine has sampled this many tokens in all."""
    while engine.activity()["tokens"] < tokens:
        await asyncio.sleep(0.002)  # leaves the processor to the engine's thread


@torch.inference_mode()
def served_logprobs(models, prompt: list[int], tokens: list[int], versions: list[int]) -> torch.Tensor:
    """Token by token with a Hugging Face cache, each step with the weights of its version: KV history as served."""
    first = models[versions[0]]
    output = first(torch.tensor([prompt]), use_cache=True)
    cache, logprobs = output.get("cache", output.get("past_key_values")), []
    argument = "cache" if "cache" in output else "past_key_values"
    for i, token in enumerate(tokens):
        if i:
            output = models[versions[i]](torch.tensor([[tokens[i - 1]]]), use_cache=True, **{argument: cache})
        logprobs.append(output.logits[0, -1].float().log_softmax(-1)[token])
    return torch.stack(logprobs)


async def across_swaps(engine: LocalEngine, name: str, versions: int = 3, length: int = 60):
    """Six requests during which the weights change `versions - 1` times, from version 0."""
    wanted = [(p, request(i, max_tokens=length, stop=())) for i, p in enumerate(prompts(6))]
    running = asyncio.create_task(complete(engine, wanted))
    for version in range(1, versions):
        await until(engine, version * 6 * length // versions)
        await engine.load_weights(weights(name, seed=version), version)
        assert engine.version == version
    return wanted, await running


@pytest.mark.parametrize("name", list(CONFIGS))
def test_running_requests_keep_their_kv_and_record_who_sampled_each_token(name):
    wanted, done = serve(lambda e: across_swaps(e, name), build=lambda: make_model(name))
    models = [make_model(name, seed=s) for s in range(3)]
    for (prompt, _), c in zip(wanted, done, strict=True):
        assert sorted(set(c.versions.tolist())) == [0, 1, 2]
        assert (np.diff(c.versions) >= 0).all()
        expected = served_logprobs(models, prompt, c.token_ids.tolist(), c.versions.tolist())
        torch.testing.assert_close(torch.from_numpy(c.logprobs), expected, atol=1e-5, rtol=3e-6)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_recompute_makes_each_segment_equal_the_full_forward_of_its_weights(name):
    wanted, done = serve(lambda e: across_swaps(e, name), build=lambda: make_model(name), on_update="recompute")
    models = [make_model(name, seed=s) for s in range(3)]
    for (prompt, _), c in zip(wanted, done, strict=True):
        assert sorted(set(c.versions.tolist())) == [0, 1, 2]
        for version, model in enumerate(models):
            mine = c.versions == version
            expected = full_logprobs(model, prompt, c.token_ids.tolist())[torch.from_numpy(mine)]
            torch.testing.assert_close(torch.from_numpy(c.logprobs[mine]), expected, atol=1e-5, rtol=0)


def test_drain_lets_running_requests_end_under_the_weights_they_began_with():
    wanted, done = serve(lambda e: across_swaps(e, "qwen3"), on_update="drain", max_concurrency=4)
    assert all(len(set(c.versions.tolist())) == 1 for c in done)
    assert {int(c.versions[0]) for c in done} > {0}
    for (prompt, _), c in zip(wanted, done, strict=True):
        model = make_model("qwen3", seed=int(c.versions[0]))
        expected = full_logprobs(model, prompt, c.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(c.logprobs), expected, atol=1e-5, rtol=0)


def test_after_a_swap_an_engine_equals_a_fresh_one_bit_for_bit():
    wanted = [(p, request(i)) for i, p in enumerate(prompts(10))]

    async def use(engine):
        await complete(engine, wanted)
        await engine.load_weights(weights("qwen3", seed=5), 5)
        return await complete(engine, wanted)

    swapped = serve(use)
    fresh = serve(lambda e: complete(e, wanted), build=lambda: make_model(seed=5), version=5)
    assert all(same(a, b) for a, b in zip(swapped, fresh, strict=True))
    assert all((c.versions == 5).all() for c in swapped)


def test_an_engine_without_weights_waits_for_the_first_ones():
    async def use(engine):
        assert engine.version == -1
        early = asyncio.create_task(engine.generate([5, 6], request(1)))
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.activity()["tokens"] == 0
        await engine.load_weights(weights("qwen3", seed=2), 0)
        return await early

    waited = serve(use, version=-1)
    assert same(waited, serve(lambda e: e.generate([5, 6], request(1)), build=lambda: make_model(seed=2)))


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on():
    good = dict(weights("qwen3", seed=1))

    async def use(engine):
        before = await engine.generate([5], request(3))
        name = next(iter(good))
        for bad, message in (
            ({**good, "extra": torch.zeros(1)}, r"unknown \['extra'\]"),
            ({n: t for n, t in good.items() if n != name}, "missing"),
            ({**good, name: torch.zeros(3)}, "the model has"),
        ):
            with pytest.raises(ValueError, match=message):
                await engine.load_weights(bad.items(), 1)
        await engine.discard_weights()
        with pytest.raises(RuntimeError, match="never received"):
            await engine.commit_weights(1)
        assert engine.version == 0
        assert same(before, await engine.generate([5], request(3)))

    serve(use)


def test_tied_weights_may_come_under_either_name_and_in_another_type():
    named = dict(weights("qwen3", seed=4))
    renamed = {n.replace("model.embed_tokens", "lm_head"): t.double() for n, t in named.items()}
    assert "lm_head.weight" in renamed

    async def use(engine):
        await engine.load_weights(renamed.items(), 1)
        return await engine.generate([5, 9], request(8))

    assert same(serve(use), serve(lambda e: e.generate([5, 9], request(8)), build=lambda: make_model(seed=4)))
