"""What the vLLM engine must never get wrong: which weights serve, who sampled a token, and with what probability.

Runs on CPU in continuous integration, on a GPU by hand (`python -m pytest tests/test_vllm_truth.py -m vllm -s` prints
the figures). One engine serves all tests; each publishes the models it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

from vllm_support import (  # noqa: E402  (needs vLLM)
    FIRST_LETTER,
    ON_GPU,
    Stage,
    abortive_sync,
    k3,
    peaked_model,
    prompts,
    revealing_model,
    sampling,
    score,
    wait_until,
)
from weights_peers import Holder  # noqa: E402

from asyncrl.generation.engine import EngineDead  # noqa: E402
from asyncrl.generation.vllm import MARGIN_S, VLLMEngine  # noqa: E402
from asyncrl.generation.vllm_args import RECEIVER  # noqa: E402
from asyncrl.generation.vllm_logits import has_switch  # noqa: E402
from asyncrl.models import TINY  # noqa: E402
from asyncrl.settings import load, resolve  # noqa: E402
from asyncrl.types import Completion  # noqa: E402

GREEDY = 0.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("run"))
    yield made
    made.close()


@pytest.fixture
def keep(stage: Stage) -> Iterator[Stage]:
    """The stage, with its way of updating restored afterwards."""
    before = stage.config.generation.on_update
    yield stage
    stage.config.generation.on_update = before


async def sample(stage: Stage, ids: list[list[int]], tokens: int, temperature: float = 1.0) -> list[Completion]:
    return await asyncio.gather(*(stage.engine.generate(p, sampling(tokens, temperature=temperature)) for p in ids))


async def started(stage: Stage, tokens: int) -> None:
    """Wait until the engine has returned this many more tokens."""
    goal = stage.engine.activity()["tokens"] + tokens
    while stage.engine.activity()["tokens"] < goal:
        await asyncio.sleep(0.005)


def report(**figures: Any) -> None:
    print(" ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()))


def test_requests_wait_for_the_first_weights_and_are_stamped_with_version_0(stage: Stage) -> None:
    async def scenario() -> list[Completion]:
        early = asyncio.create_task(sample(stage, prompts(2, 5), 4))
        await asyncio.sleep(0)
        assert stage.engine.version == -1
        await stage.publish(revealing_model(0))
        return await early

    for completion in stage.run(scenario()):
        assert completion.token_ids.tolist() == [FIRST_LETTER] * 4
        assert completion.versions.tolist() == [0] * 4
        assert completion.finish_reason == "length"


def test_synced_weights_give_the_log_probabilities_of_a_fresh_engine(stage: Stage, tmp_path: Path) -> None:
    model, ids = peaked_model(1), prompts(4, 40)

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        await stage.publish(peaked_model(2))
        old = [(await sample(stage, [p], 24, GREEDY))[0] for p in ids]
        await stage.publish(model)
        return old, [(await sample(stage, [p], 24, GREEDY))[0] for p in ids]

    old, synced = stage.run(scenario())
    model.save_pretrained(tmp_path)
    fresh = fresh_engine(tmp_path, ids, 24)
    for before, ours, (token_ids, logprobs) in zip(old, synced, fresh, strict=True):
        assert ours.token_ids.tolist() == token_ids
        np.testing.assert_allclose(ours.logprobs, logprobs, atol=1e-5)
        assert before.token_ids.tolist() != token_ids
    differences = [np.abs(ours.logprobs - logprobs).max() for ours, (_, logprobs) in zip(synced, fresh, strict=True)]
    report(test="fresh_engine", max_abs_diff=float(max(differences)))


def fresh_engine(folder: Path, ids: list[list[int]], tokens: int) -> list[tuple[list[int], np.ndarray]]:
    """Greedy tokens and their log-probabilities from a vLLM that loaded `folder` itself."""
    from vllm import LLM, SamplingParams

    memory: dict[str, Any] = {"gpu_memory_utilization": 0.3} if ON_GPU else {"kv_cache_memory_bytes": 64 << 20}
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, enforce_eager=not ON_GPU,
        logprobs_mode="processed_logprobs", max_num_seqs=24, generation_config="vllm", worker_extension_cls=RECEIVER,
        hf_overrides={"head_dtype": "float32"} if has_switch() else {}, **memory,
    )  # fmt: skip
    if ON_GPU and not has_switch():
        llm.collective_rpc("asyncrl_widen_head")
    params = SamplingParams(temperature=GREEDY, max_tokens=tokens, logprobs=0, detokenize=False)
    results = []
    for prompt in ids:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        part = output.outputs[0]
        pairs = zip(part.token_ids, part.logprobs, strict=True)
        results.append((list(part.token_ids), np.array([entry[token].logprob for token, entry in pairs])))
    llm.llm_engine.engine_core.shutdown()
    return results


@pytest.mark.parametrize("reports_versions", [True, False], ids=["reported by vLLM", "stamped here"])
def test_every_token_carries_the_version_that_sampled_it(
    stage: Stage, reports_versions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reports_versions and not stage.engine._reports_versions:
        pytest.skip("this vLLM does not report versions")

    async def scenario() -> list[Completion]:
        base = await stage.publish(revealing_model((stage.version + 1) % 8))
        monkeypatch.setattr(stage.engine, "_reports_versions", reports_versions)
        tasks = [asyncio.create_task(sample(stage, prompts(1, 3 + i, seed=i), 150 + 10 * i)) for i in range(40)]
        for _ in range(4):
            await started(stage, 400)
            await stage.publish(revealing_model((stage.version + 1) % 8))
        done = [completion for group in await asyncio.gather(*tasks) for completion in group]
        assert stage.version == base + 4
        return done

    done = stage.run(scenario())
    for completion in done:
        letters = [FIRST_LETTER + version % 8 for version in completion.versions.tolist()]
        assert completion.token_ids.tolist() == letters
    crossing = sum(len(set(c.versions.tolist())) > 1 for c in done)
    assert crossing >= 20, "too few requests lived through an update for this to prove anything"
    report(test="versions", requests=len(done), crossing=crossing, tokens=sum(len(c.versions) for c in done))


def test_no_worker_loads_before_vllm_was_told_to_pause(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    core, orders = stage.engine._llm.engine_core, []
    send = core._send_input_message

    async def sent(message: Any, *args: Any) -> Any:
        orders.extend(name for name in (b"pause_scheduler", b"asyncrl_begin") if name in b"".join(message[1:]))
        return await send(message, *args)

    async def scenario() -> None:
        await stage.publish(revealing_model(1))
        monkeypatch.setattr(core, "_send_input_message", sent)
        await stage.publish(revealing_model(2))

    stage.run(scenario())
    assert orders == [b"pause_scheduler", b"asyncrl_begin"]


def test_half_of_a_version_that_another_receiver_broke_is_received_anew(stage: Stage) -> None:
    if stage.device.type != "cpu":
        pytest.skip("the other receiver would need a GPU of its own, or a process beside this sender's")

    async def scenario() -> tuple[int, Completion, Completion]:
        old = await stage.publish(revealing_model(1))
        other = Holder({"at": "load", "error": "no memory"}, "cpu")
        following = asyncio.create_task(stage.follow(other, 1))
        while await asyncio.to_thread(stage._sender.newcomers) == 0:
            await asyncio.sleep(0.01)
        running = asyncio.create_task(sample(stage, prompts(1, 8), 500))
        await started(stage, 10)
        stage.at_half(lambda: wait_until(lambda: other._fault == {}))  # what is sent then meets a broken group
        await stage.publish(revealing_model(2))
        (late,) = await sample(stage, prompts(1, 9), 20)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await other.close()
        return old, (await running)[0], late

    old, running, late = stage.run(scenario())
    assert set(running.versions.tolist()) == {old, old + 1}
    assert running.token_ids.tolist() == [FIRST_LETTER + 1 + version - old for version in running.versions.tolist()]
    assert late.token_ids.tolist() == [FIRST_LETTER + 2] * 20


def test_prefix_cache_serves_no_old_weights_thanks_to_the_salt(stage: Stage) -> None:
    model, (ids,) = peaked_model(4), prompts(1, 600)

    async def scenario() -> tuple[Completion, Completion, Completion]:
        await stage.publish(peaked_model(3))
        await sample(stage, [ids], 16, GREEDY)
        await unsalted(stage, ids, 16)
        await stage.publish(model)
        (first,) = await sample(stage, [ids], 16, GREEDY)
        (again,) = await sample(stage, [ids], 16, GREEDY)  # from the cache, which is now of this version
        return first, again, await unsalted(stage, ids, 16)

    done = stage.run(scenario())
    errors = [float(np.abs(c.logprobs - s.alone).mean()) for c, s in zip(done, score(model, done), strict=True)]
    first, again, leaked = errors
    report(test="prefix_cache", first=first, from_cache=again, without_salt=leaked)
    assert max(first, again) < 0.03
    assert leaked > 10 * max(first, again), "without the salt the old version's cache should have shown"


async def unsalted(stage: Stage, ids: list[int], tokens: int) -> Completion:
    """The same request around the engine, under a salt that does not change with the version."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=GREEDY, max_tokens=tokens, logprobs=0, detokenize=False, output_kind=kind)
    prompt = {"prompt_token_ids": ids, "cache_salt": "always the same"}
    outputs = [o async for o in stage.engine._llm.generate(prompt, params, f"unsalted-{stage.version}")]
    part = outputs[-1].outputs[0]
    logprobs = [entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)]
    return Completion(
        prompt_ids=np.array(ids),
        token_ids=np.array(part.token_ids),
        logprobs=np.array(logprobs),
        versions=np.zeros(tokens),
        finish_reason="length",
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_and_generator_agree_at_lag_0(stage: Stage, temperature: float) -> None:
    model = peaked_model(5)

    async def scenario() -> list[Completion]:
        await stage.publish(model)
        return await sample(stage, prompts(16, 30), 64, temperature)

    done = stage.run(scenario())
    scored = score(model, done, temperature=temperature)
    behaviour = np.concatenate([c.logprobs for c in done])
    alone = np.concatenate([s.alone for s in scored])
    batched = np.concatenate([s.batched for s in scored])
    figures = {
        "k3": k3(behaviour, alone),
        "mean_abs_diff": float(np.abs(alone - behaviour).mean()),
        "noise_floor": float(np.abs(alone - batched).mean()),
        "mean_logprob": float(behaviour.mean()),
    }
    report(test="lag_0", temperature=temperature, tokens=len(behaviour), **figures)
    assert figures["k3"] < 1e-3
    untempered = np.concatenate([s.alone for s in score(model, done, temperature=1.7 - temperature)])
    if temperature != 1.0:
        assert k3(behaviour, untempered) > 10 * figures["k3"], "the recorded values are not those of this temperature"


def test_recompute_leaves_no_trace_of_the_old_weights_and_keep_does(keep: Stage) -> None:
    async def scenario(on_update: str, model: Any) -> Completion:
        keep.config.generation.on_update = on_update
        await keep.publish(peaked_model(6))
        task = asyncio.create_task(sample(keep, prompts(1, 200, seed=9), 200))
        await started(keep, 20)
        await keep.publish(model)
        return (await task)[0]

    errors = {}
    for on_update in ("recompute", "keep"):
        model = peaked_model(7)
        completion = keep.run(scenario(on_update, model))
        new = completion.versions == keep.version
        assert 20 <= new.sum() < 200
        errors[on_update] = float(np.abs(completion.logprobs - score(model, [completion])[0].alone)[new].mean())
    report(test="on_update", **errors)
    assert errors["recompute"] < 0.05
    assert errors["keep"] > 10 * errors["recompute"]


def test_drain_finishes_running_requests_first(keep: Stage) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion]]:
        await keep.publish(revealing_model(1))
        keep.config.generation.on_update = "drain"
        task = asyncio.create_task(sample(keep, prompts(8, 10), 60))
        await started(keep, 30)
        update = asyncio.create_task(keep.publish(revealing_model(2)))
        while keep.engine._open.is_set():
            await asyncio.sleep(0.005)
        late = asyncio.create_task(sample(keep, prompts(2, 10), 10))
        await update
        return await task, await late

    running, late = keep.run(scenario())
    assert all(set(c.versions.tolist()) == {keep.version - 1} for c in running)
    assert all(set(c.versions.tolist()) == {keep.version} for c in late)


def test_stop_token_ends_a_completion_and_is_part_of_it(stage: Stage) -> None:
    async def scenario() -> Completion:
        await stage.publish(revealing_model(3))
        stop = sampling(50, stop=[FIRST_LETTER + 3])
        return await stage.engine.generate(prompts(1, 4)[0], stop)

    completion = stage.run(scenario())
    assert completion.token_ids.tolist() == [FIRST_LETTER + 3]
    assert completion.finish_reason == "stop"
    assert completion.text == "j"
    assert len(completion.logprobs) == len(completion.versions) == 1


def test_request_aborted_inside_vllm_never_looks_finished(stage: Stage) -> None:
    async def scenario() -> Completion:
        await stage.publish(revealing_model(4))
        task = asyncio.create_task(stage.engine.generate(prompts(1, 4)[0], sampling(900)))
        await started(stage, 10)
        (request,) = stage.engine._running
        await stage.engine._llm.abort(request)
        return await task

    completion = stage.run(scenario())
    assert completion.finish_reason == "abort"
    assert 10 <= len(completion.token_ids) < 900
    assert set(completion.versions.tolist()) == {stage.version}


def test_cancelled_call_aborts_its_request_and_no_other(stage: Stage) -> None:
    async def scenario() -> Completion:
        await stage.publish(revealing_model(5))
        doomed = asyncio.create_task(stage.engine.generate(prompts(1, 4)[0], sampling(900)))
        other = asyncio.create_task(stage.engine.generate(prompts(1, 5)[0], sampling(60)))
        await started(stage, 10)
        doomed.cancel()
        result = await other
        assert doomed.cancelled()
        assert not stage.engine._running
        assert not stage.engine._llm.output_processor.request_states
        return result

    assert len(stage.run(scenario()).token_ids) == 60


def test_prompt_longer_than_the_model_is_refused_and_the_engine_goes_on(stage: Stage) -> None:
    async def scenario() -> list[Completion]:
        with pytest.raises(ValueError, match="1024"):
            await stage.engine.generate([5] * 1500, sampling(4))
        return await sample(stage, prompts(1, 4), 4)

    assert len(stage.run(scenario())) == 1


def test_engine_killed_amid_a_broadcast_is_dropped_and_its_replacement_serves_only_the_current_version(
    stage: Stage,
) -> None:
    """It kills the engine that the others share; what follows has a new one."""

    async def death() -> None:
        await stage.publish(revealing_model(6))
        task = asyncio.create_task(stage.engine.generate(prompts(1, 4)[0], sampling(900)))
        await started(stage, 10)
        report = await stage.publish_and_kill(revealing_model(7))
        assert report.receivers == 0
        assert len(report.dropped) == 1
        with pytest.raises(EngineDead):
            await task
        with pytest.raises(EngineDead):
            stage.engine.activity()
        with pytest.raises(EngineDead):
            await stage.engine.generate([5], sampling(4))
        with pytest.raises(EngineDead):
            await stage.follower

    async def replacement() -> list[Completion]:
        waiting = asyncio.create_task(sample(stage, prompts(3, 5), 6))
        await asyncio.sleep(0)
        await stage.publish()
        return await waiting

    stage.run(death(), timeout_s=90)
    stage.run(stage.engine.close())
    stage.start_engine()
    for completion in stage.run(replacement()):
        assert completion.token_ids.tolist() == [FIRST_LETTER + 7] * 6
        assert set(completion.versions.tolist()) == {stage.version}


@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_that_does_not_go_on_after_a_sync_is_noticed_though_nobody_waits(tmp_path: Path, hangs: bool) -> None:
    config = load(None, {"run_dir": str(tmp_path), "generation.engine": "vllm", "model.path": TINY})
    engine = VLLMEngine(resolve(config), 0)
    engine._timeout_s = -MARGIN_S + 0.1

    async def resume() -> None:
        await asyncio.sleep(60 if hangs else 0)
        raise RuntimeError("a pause is in flight")

    async def scenario() -> None:
        engine._llm = SimpleNamespace(errored=False, resume_generation=resume, shutdown=lambda: None)
        engine._reports_versions = False
        await engine.commit_weights(3)
        assert engine.version == 3
        await asyncio.to_thread(wait_until, lambda: engine._death != "")
        with pytest.raises(EngineDead, match="did not resume" if hangs else "a pause is in flight"):
            engine.activity()
        await engine.close()

    asyncio.run(scenario())


def test_half_a_version_is_never_served_though_the_attempt_after_it_brought_nothing(stage: Stage) -> None:
    """Last: the engine is lost."""

    async def scenario() -> None:
        for generation, num_buckets in ((1, 2), (2, 0)):
            with pytest.raises(Exception, match="the test gave up"):  # an RPC keeps but the text
                await abortive_sync(stage, generation, num_buckets)
        with pytest.raises(EngineDead, match="half-way"):
            await stage.engine.discard_weights()

    stage.run(scenario())
