"""The named algorithms: what each one is, that all of them run as they come, and that pages say what the code does."""

import importlib
import inspect
import pkgutil

import msgspec
import numpy as np
import pytest
import torch
from losses_helpers import loss_and_gradient, make_batch, on_policy, random_sequences

import asyncrl.algos
from asyncrl import algo_docs
from asyncrl.algorithm import Algorithm
from asyncrl.config import ReplayConfig, TrainingConfig
from asyncrl.losses import checks
from asyncrl.losses.advantages import ADVANTAGES
from asyncrl.losses.corrections import CORRECTIONS
from asyncrl.losses.objectives import OBJECTIVES
from asyncrl.registry import ALGOS
from asyncrl.types import Episode

torch.set_num_threads(1)
NAMES = sorted(m.name for m in pkgutil.iter_modules(asyncrl.algos.__path__))
REQUIRED = (
    "grpo dr_grpo dapo gspo cispo sapo reinforce rloo reinforce_pp max_rl m2po dppo topr vespo delightful decoupled_ppo"
)


def make(name: str, **keys) -> Algorithm:
    return ALGOS.get(name)(**keys)


def test_every_algorithm_of_the_field_is_there():
    assert set(REQUIRED.split()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_one_short_file_that_runs_as_it_comes(name):
    algo = make(name)
    source = inspect.getsource(importlib.import_module(f"asyncrl.algos.{name}"))
    assert len(source.splitlines()) < 100
    for target_lag in (0, 2):
        minibatches = 2 if algo.needs().proximal else 1
        algo.check(training=TrainingConfig(minibatches=minibatches), replay=ReplayConfig(target_lag=target_lag))


@pytest.mark.parametrize("name", NAMES)
def test_every_bound_that_a_preset_sets_is_one_it_uses(name):
    algo = make(name)
    given = {key for key in checks.all_stage_keys() if getattr(algo, key) is not None}
    assert given <= set(checks.used_keys(algo))


STAGES = {
    "grpo": ("group_norm", "ppo_clip", "sequence_mean", {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.001}),
    "dr_grpo": ("group_mean", "ppo_clip", "constant", {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.0}),
    "dapo": ("group_norm", "ppo_clip", "token_mean", {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True}),
    "gspo": ("group_norm", "gspo", "sequence_mean", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": ("group_norm", "cispo", "token_mean", {"weight_max": 5.0}),
    "sapo": ("group_norm", "sapo", "sequence_mean", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "reinforce": ("group_mean", "reinforce", "sequence_sum", {"correction": "token_tis", "correction_cap": 2.0}),
    "rloo": ("leave_one_out", "reinforce", "sequence_sum", {"correction": "token_tis"}),
    "reinforce_pp": ("batch_norm", "ppo_clip", "token_mean", {}),
    "max_rl": ("max_rl", "reinforce", "sequence_sum", {"correction": "token_tis"}),
    "m2po": ("group_norm", "m2po", "token_mean", {"moment_budget": 0.04}),
    "dppo": ("group_norm", "dppo_tv", "token_mean", {"divergence": 0.2, "weight_max": 20.0}),
    "topr": ("group_mean", "topr", "sequence_sum", {"topr_level": "sequence"}),
    "vespo": ("group_norm", "vespo", "token_mean", {}),
    "delightful": ("group_norm", "delightful", "token_mean", {"eta": 1.0}),
    "fade": ("group_norm", "reinforce", "token_mean", {"correction": "fade", "fade_half_life": 1.0}),
    "decoupled_ppo": (
        "group_norm", "ppo_clip", "token_mean", {"anchor": "proximal", "correction": "icepop", "correction_high": 5.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_presets_choose_the_stages_of_their_papers(name):
    algo = make(name)
    advantage, objective, aggregation, keys = STAGES[name]
    assert (algo.advantage, algo.objective, algo.aggregation) == (advantage, objective, aggregation)
    assert {key: getattr(algo, key) for key in keys} == keys


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"delightful", "grpo"}))
def test_on_fresh_data_a_preset_has_the_reinforce_gradient(name):
    algo = make(name)
    logprobs_T, batch = make_batch(on_policy(random_sequences(0), fresh=algo.correction == "fade"), algo.aggregation)
    _, gradient_T = loss_and_gradient(algo, logprobs_T, batch)
    torch.testing.assert_close(gradient_T, -batch.advantages_T * batch.weights_T)


def test_only_a_penalty_needs_a_reference_and_only_a_proximal_anchor_a_pass():
    needs = {name: make(name).needs() for name in NAMES}
    assert [n for n in NAMES if needs[n].reference] == ["grpo"]
    assert [n for n in NAMES if needs[n].proximal] == ["decoupled_ppo"]
    assert [n for n in NAMES if needs[n].statistics] == ["m2po"]
    assert not make("grpo", beta=0.0).needs().reference


def test_interpolated_anchor_needs_no_forward_pass_and_sits_between():
    algo = make("decoupled_ppo", anchor="interpolated")
    assert not algo.needs().proximal
    logprobs_T, batch = make_batch(random_sequences(0), "token_mean")
    batch.proximal_T = None
    loss_and_gradient(algo, logprobs_T, batch)


@pytest.mark.parametrize("missing", ["proximal_T", "reference_T"])
def test_a_pass_that_the_engine_forgot_is_an_error(missing):
    algo = make("decoupled_ppo") if missing == "proximal_T" else make("grpo")
    logprobs_T, batch = make_batch(random_sequences(0), "token_mean")
    setattr(batch, missing, None)
    with pytest.raises(RuntimeError, match=missing):
        algo.loss(logprobs_T, batch)


def test_the_table_has_a_row_for_each_with_its_paper():
    rows = {row["name"]: row for row in algo_docs.table()}
    assert set(NAMES) <= set(rows)
    assert rows["dapo"]["trust region"] == "ratio of a token in [0.8, 1.28]"
    assert rows["reinforce"]["trust region"] == "none: weight at most 2"
    assert all(rows[name]["paper"].startswith("arXiv:") for name in set(STAGES) - {"reinforce", "fade"})
    assert set(rows["dapo"]) == {"name", "objective", "advantages", "aggregation", "trust region", "paper"}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_gives_formula_omissions_keys_and_defaults(name):
    page, algo = algo_docs.page(name), make(name)
    assert "L = " in page
    assert "A = " in page
    assert "Leaves out" in page
    for key, value in checks.used_keys(algo).items():
        assert f"--algo.{key} {value}" in page
    unused = set(checks.all_stage_keys()) - set(checks.used_keys(algo))
    assert not any(f"--algo.{key} " in page for key in unused)


def test_every_stage_and_key_is_documented():
    docs = algo_docs.field_docs(Algorithm)
    assert {f.name for f in msgspec.structs.fields(Algorithm)} <= set(docs)
    for stages in (OBJECTIVES, CORRECTIONS, ADVANTAGES):
        assert all(inspect.getdoc(stage) for stage in stages.values())


def episode(length: int, *, reason: str = "stop", observed: int = 0) -> Episode:
    mask = np.arange(length + observed) < length
    zeros = np.zeros(length + observed)
    return Episode(
        prompt_ids=np.array([1]), token_ids=zeros.astype(np.int32), logprobs=zeros.astype(np.float32),
        versions=zeros.astype(np.int32), loss_mask=mask, reward=1.0, finish_reason=reason,
    )  # fmt: skip


@pytest.mark.parametrize(("length", "penalty"), [(60, 0), (80, 0), (90, 0.5), (95, 0.75), (100, 1), (140, 1)])
def test_the_soft_overlong_penalty_grows_over_its_buffer(length, penalty):
    algo = Algorithm(overlong_buffer=20)
    assert algo.reward(episode(length), 100) == pytest.approx(1 - penalty)
    assert algo.reward(episode(length, observed=50), 100) == pytest.approx(1 - penalty), "observed tokens do not count"
    assert Algorithm(overlong_buffer=20, overlong_penalty=0.5).reward(episode(length), 100) == 1 - penalty / 2
    assert Algorithm().reward(episode(length), 100) == 1.0


def test_the_overlong_mask_leaves_out_what_was_cut_off():
    algo = Algorithm(overlong_mask=True)
    assert algo.trains(episode(5))
    assert not algo.trains(episode(5, reason="length"))
    assert Algorithm().trains(episode(5, reason="length"))


@pytest.mark.parametrize(("ess", "factor"), [(1.0, 1.0), (0.5, 1.0), (0.125, 0.5), (0.0, 0.0)])
def test_the_learning_rate_follows_the_effective_sample_size(ess, factor):
    assert Algorithm(ess_lr=0.5).lr_scale({"ratio/ess_sequence": ess}) == pytest.approx(factor)
    assert Algorithm().lr_scale({}) == 1.0
