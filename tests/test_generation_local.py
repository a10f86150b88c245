"""The local engine: equal to a plain forward, whatever joins, leaves or is swapped meanwhile."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch
from generation_models import CONFIGS, TOKENS, VOCABULARY, full_logprobs, make_model
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncrl.generation.engine import EngineDead
from asyncrl.generation.local import LocalEngine
from asyncrl.generation.runner import Runner, agreeing_sizes
from asyncrl.models import tiny_config
from asyncrl.types import Completion, SamplingParams

torch.set_num_threads(1)
NAMES = list(CONFIGS)
EOS = 2


def serve(use: Callable[[LocalEngine], Awaitable], *, build=make_model, **settings):
    """Run `use(engine)` with a started engine, for at most a minute."""

    async def go():
        engine = LocalEngine(build, **{"max_length": 256, **settings})
        await engine.start()
        try:
            return await asyncio.wait_for(use(engine), 60)
        finally:
            await asyncio.wait_for(engine.close(), 60)

    return asyncio.run(go())


def prompts(n: int, *, seed: int = 0) -> list[list[int]]:
    """`n` distinct prompts of 1 to 40 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCABULARY, size=rng.integers(1, 41)).tolist() for _ in range(n)]


def request(seed: int, *, max_tokens: int = 24, temperature: float = 1.0, stop: tuple[int, ...] = (EOS,)):
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stop)


def same(a: Completion, b: Completion) -> bool:
    """Bit for bit, log-probabilities included."""
    return (
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))
        and a.finish_reason == b.finish_reason
    )


async def complete(engine: LocalEngine, wanted: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(p, s) for p, s in wanted))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_plain_full_forward(name, temperature):
    wanted = [(p, request(i, max_tokens=60, temperature=temperature, stop=())) for i, p in enumerate(prompts(12))]
    done = serve(lambda e: complete(e, wanted), build=lambda: make_model(name), max_concurrency=12)
    model = make_model(name)
    for (prompt, _), c in zip(wanted, done, strict=True):
        assert len(c.token_ids) == 60
        expected = full_logprobs(model, prompt, c.token_ids.tolist(), temperature)
        torch.testing.assert_close(torch.from_numpy(c.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_temperature_zero_equals_greedy_generate(name):
    wanted = [(p, request(0, max_tokens=40, temperature=0.0)) for p in prompts(6)]
    done = serve(lambda e: complete(e, wanted), build=lambda: make_model(name))
    model = make_model(name)
    for (prompt, _), c in zip(wanted, done, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)[0]
        assert c.token_ids.tolist() == whole[len(prompt) :].tolist()
        expected = full_logprobs(model, prompt, c.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(c.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_request_gives_the_same_bits_alone_in_a_full_batch_and_joining_late(name):
    wanted = [(p, request(i, max_tokens=20 + 9 * (i % 6))) for i, p in enumerate(prompts(40))]

    async def alone(engine):
        return [await engine.generate(p, s) for p, s in wanted[:6]]

    async def staggered(engine):
        async def later(i):
            for _ in range(i):  # one turn of the loop each: requests trickle in while others run
                await asyncio.sleep(0)
            return await engine.generate(*wanted[i])

        return await asyncio.gather(*(later(i) for i in reversed(range(40))))

    build = lambda: make_model(name)  # noqa: E731
    one_by_one = serve(alone, build=build, max_concurrency=1)
    together = serve(lambda e: complete(e, wanted), build=build, max_concurrency=40)
    late = serve(staggered, build=build, max_concurrency=37)[::-1]
    assert all(same(a, b) for a, b in zip(one_by_one, together, strict=False))
    assert all(same(a, b) for a, b in zip(together, late, strict=True))


def test_siblings_differ_by_seed_and_share_one_prefill():
    prompt = prompts(1)[0]
    forwards = []

    def build():
        model = make_model()
        model.register_forward_pre_hook(lambda _, __, kw: forwards.append(kw["input_ids"].shape), with_kwargs=True)
        return model

    async def use(engine):
        forwards.clear()
        return await complete(engine, [(prompt, request(s, stop=())) for s in range(8)])

    done = serve(use, build=build)
    assert sum(shape == (1, len(prompt)) for shape in forwards) == 1
    assert len({tuple(c.token_ids.tolist()) for c in done}) == 8


def test_generation_ends_at_a_stop_token_which_is_kept_or_at_the_limit():
    prompt = prompts(1)[0]
    free = serve(lambda e: e.generate(prompt, request(3, stop=())))
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)

    async def use(engine):
        return await complete(
            engine, [(prompt, request(3, stop=(7, stop))), (prompt, request(3, max_tokens=1, stop=()))]
        )

    stopped, short = serve(use)
    assert stopped.token_ids.tolist()[-1] in (7, stop)
    assert len(stopped.token_ids) <= first + 1
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: len(stopped.token_ids)]
    assert (stopped.finish_reason, short.finish_reason, free.finish_reason) == ("stop", "length", "length")
    assert len(short.token_ids) == 1


def test_a_cancelled_call_frees_its_slot_and_changes_nothing_for_the_others():
    wanted = [(p, request(i, max_tokens=150, stop=())) for i, p in enumerate(prompts(3))]

    async def use(engine):
        doomed = [asyncio.create_task(engine.generate(*wanted[0])) for _ in range(2)]
        await asyncio.sleep(0)
        waiting = asyncio.create_task(engine.generate(*wanted[1]))
        await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        cancelled = await asyncio.gather(*doomed, return_exceptions=True)
        assert all(isinstance(c, asyncio.CancelledError) for c in cancelled)
        return await waiting

    survivor = serve(use, max_concurrency=2)
    assert same(survivor, serve(lambda e: e.generate(*wanted[1])))


def test_closing_returns_what_running_requests_have_as_aborted():
    async def use():
        engine = LocalEngine(make_model, max_length=2000)
        await engine.start()
        running = asyncio.create_task(engine.generate(prompts(1)[0], request(1, max_tokens=1900, stop=())))
        while engine.activity()["tokens"] < 5:
            await asyncio.sleep(0.002)
        await engine.close()
        completion = await running
        with pytest.raises(EngineDead, match="closed"):
            await engine.generate([5], request(1))
        return completion

    completion = asyncio.run(asyncio.wait_for(use(), 60))
    assert completion.finish_reason == "abort"
    assert 5 <= len(completion.token_ids) < 1900
    assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)


def test_a_request_that_can_never_be_served_is_refused_at_once():
    async def use(engine):
        for prompt, params, message in (
            ([], request(0), "needs a prompt"),
            ([5] * 250, request(0, max_tokens=24), "exceeds 256"),
            ([VOCABULARY], request(0), "vocabulary"),
            ([-1], request(0), "vocabulary"),
            ([5], request(0, temperature=-1.0), "temperature"),
            ([5], request(0, temperature=float("nan")), "temperature"),
        ):
            with pytest.raises(ValueError, match=message):
                await engine.generate(prompt, params)
        return await engine.generate([5], request(0, max_tokens=255))

    assert len(serve(use).token_ids) >= 1


def test_a_vocabulary_may_be_smaller_than_a_tile_of_rows():
    config = copy.deepcopy(CONFIGS["qwen3"])
    config.vocab_size = 8
    runner = Runner(AutoModelForCausalLM.from_config(config, dtype=torch.float32), num_slots=32)
    assert agreeing_sizes(runner)[0] == 16


def test_learned_positions_bound_the_length_whatever_the_settings_say():
    async def use(engine):
        with pytest.raises(ValueError, match="exceeds 512"):
            await engine.generate([5] * 500, request(0, max_tokens=13))

    serve(use, build=lambda: make_model("gpt2"), max_length=4096)


def test_a_model_that_fails_kills_the_engine_and_wakes_everyone():
    armed = threading.Event()  # not during the comparisons at the start

    def build():
        model = make_model()

        def explode(_, args, kwargs):
            if armed.is_set() and kwargs["position_ids"].max() > 60:
                raise RuntimeError("the model burst")

        model.register_forward_pre_hook(explode, with_kwargs=True)
        return model

    async def use(engine):
        armed.set()
        wanted = [(p, request(i, max_tokens=100, stop=())) for i, p in enumerate(prompts(5))]
        results = await asyncio.gather(*(engine.generate(p, s) for p, s in wanted), return_exceptions=True)
        assert all(isinstance(r, EngineDead) and "the model burst" in str(r) for r in results)
        with pytest.raises(EngineDead):
            await engine.generate([5], request(0))

    serve(use, build=build)


def test_weights_that_are_not_finite_end_the_engine_with_the_version():
    async def use(engine):
        broken = {n: p.detach().clone().fill_(float("nan")) for n, p in make_model().named_parameters()}
        await engine.load_weights(broken.items(), version=9)
        with pytest.raises(EngineDead, match="version 9 gave a log-probability of nan"):
            await engine.generate([5], request(0))

    serve(use)


def test_a_model_that_cannot_be_served_from_slots_is_refused_at_the_start():
    from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2, **TOKENS))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, **TOKENS))
    for model in (bloom, mamba):
        engine = LocalEngine(lambda model=model: model)
        with pytest.raises(ValueError, match=r"the local engine cannot serve .*set generation\.engine to vllm"):
            asyncio.run(asyncio.wait_for(engine.start(), 60))


def test_sliding_windows_are_kept_while_decoding_and_in_the_prompt():
    def build():
        torch.manual_seed(0)
        window = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
        config = Qwen3Config(**tiny_config().to_dict() | window | {"sliding_window": 8})
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.12)
        return model.eval()

    wanted = [(p, request(i, max_tokens=40, stop=())) for i, p in enumerate(prompts(8))]
    done = serve(lambda e: complete(e, wanted), build=build)
    model = build()
    assert model.model.layers[1].self_attn.sliding_window == 8
    for (prompt, _), c in zip(wanted, done, strict=True):
        expected = full_logprobs(model, prompt, c.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(c.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_logprobs_equal_a_plain_full_forward(name, dtype):
    def build():
        return make_model(name, dtype=dtype).to("cuda")

    wanted = [(p, request(i, max_tokens=60, stop=())) for i, p in enumerate(prompts(20))]
    done = serve(lambda e: complete(e, wanted), build=build)
    model = build()
    for (prompt, _), c in zip(wanted, done, strict=True):
        expected = full_logprobs(model, prompt, c.token_ids.tolist()).cpu()
        atol = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(torch.from_numpy(c.logprobs), expected, atol=atol, rtol=0)
