"""Combinations that would not mean what they say are refused, in one line with the remedy, and nothing else is."""

import pytest

from asyncrl.algorithm import Algorithm, as_algorithm
from asyncrl.config import ReplayConfig, TrainingConfig
from asyncrl.losses import checks
from asyncrl.losses.corrections import CORRECTIONS, WEIGHTS
from asyncrl.losses.modules import ReinforceLoss
from asyncrl.losses.objectives import OBJECTIVES, WITHOUT_RATIO


class OwnObjective(Algorithm):
    margin: float = 0.1

    def surrogate(self, tokens):
        return -tokens.advantages_T * tokens.logprobs_T, {}


class OwnLoss(Algorithm):
    def loss(self, logprobs_T, batch):
        return -batch.advantages_T * logprobs_T, {}


class OwnAdvantages(Algorithm):
    def advantages(self, rewards_PG):
        return rewards_PG


def problems(algo: Algorithm, *, target_lag: int = 2, minibatches: int = 1) -> list[str]:
    training, replay = TrainingConfig(minibatches=minibatches), ReplayConfig(target_lag=target_lag)
    found = list(checks.problems(algo, training=training, replay=replay))
    if found:
        with pytest.raises(ValueError, match=r".") as caught:
            algo.check(training=training, replay=replay)
        assert str(caught.value) == found[0]
    return found


REFUSED = [
    # a key that the chosen stages do not use
    ({"objective": "cispo", "clip_high": 0.3}, "algo.clip_high is used by ppo_clip, gspo, m2po, not by objective"),
    ({"correction_cap": 3.0}, "algo.correction_cap is used by token_tis, sequence_tis"),
    ({"objective": "sapo", "dual_clip": 2.0}, "algo.dual_clip is used by ppo_clip"),
    ({"eta": 2.0}, "algo.eta is used by delightful"),
    ({"age_tightening": 0.1}, "set --algo.correction token_tis"),
    ({"correction": "fade", "age_tightening": 0.1}, "has none: set --algo.correction token_tis"),
    ({"correction": "fade", "fade_half_life": 0.0}, "must be above 0"),
    ({"fade_half_life": 2.0}, "algo.fade_half_life is used by fade"),
    ({"objective": "reinforce", "correction": "veto", "self_normalise": True}, "choose one of icepop"),
    ({"self_normalise": True}, "choose one of icepop"),
    ({"kl": "k3"}, "set --algo.beta above 0"),
    ({"kl_in": "reward"}, "set --algo.beta above 0"),
    ({"kl_unbiased": True}, "set --algo.beta above 0"),
    ({"overlong_penalty": 0.5}, "algo.overlong_buffer is 0"),
    # groups
    ({"n_samples": 1}, "set --algo.n_samples 2 or more, or --algo.advantage batch"),
    ({"n_samples": 1, "advantage": "raw", "dynamic_sampling": True}, "set --algo.n_samples 2"),
    ({"objective": "topr", "advantage": "max_rl", "overlong_buffer": 4}, "set overlong_buffer 0"),
    # stale data
    ({"objective": "reinforce"}, "set --algo.correction token_tis, or --replay.target_lag 0"),
    ({"anchor": "interpolated"}, "leaves prox/mu uncorrected"),
    # a proximal policy that says nothing
    ({"anchor": "proximal", "correction": "token_tis"}, "set --training.minibatches 2 or more"),
    ({"objective": "reinforce", "correction": "token_tis", "anchor": "proximal"}, "has no ratio"),
    ({"objective": "m2po", "anchor": "proximal", "correction": "token_tis"}, "choose --algo.anchor behaviour"),
    # KL
    ({"beta": 0.1, "kl": "k1"}, "k1 as a loss has zero expected gradient"),
    ({"beta": 0.1, "kl": "k2", "kl_in": "reward"}, "leave --algo.kl out"),
    ({"beta": 0.1, "kl_in": "reward", "kl_unbiased": True}, "leave it out"),
    # ranges
    ({"n_samples": 0}, "algo.n_samples must be at least 1"),
    ({"temperature": 0.0}, "algo.temperature must be above 0"),
    ({"clip_low": 1.0}, "must be below 1"),
    ({"clip_low": -0.1}, "must be at least 0"),
    ({"dual_clip": 0.5}, "must be 0 (off) or at least 1"),
    ({"objective": "cispo", "weight_max": 0.5}, "must be at least 1"),
    ({"objective": "dppo_tv", "divergence": -0.1}, "must be at least 0"),
    ({"objective": "m2po", "moment_budget": -1.0}, "must be at least 0"),
    ({"objective": "sapo", "tau_positive": 0.0}, "must be above 0"),
    ({"objective": "sapo", "tau_negative": -1.0}, "must be above 0"),
    ({"objective": "delightful", "eta": 0.0}, "must be above 0"),
    ({"objective": "reinforce", "correction": "token_tis", "correction_cap": 0.5}, "must be at least 1"),
    ({"objective": "reinforce", "correction": "icepop", "correction_low": 1.5}, "so that fresh data is kept"),
    ({"objective": "reinforce", "correction": "icepop", "correction_low": -0.1}, "must be at least 0"),
    ({"objective": "reinforce", "correction": "icepop", "correction_high": 0.5}, "must be at least 1"),
    ({"correction": "opsm", "opsm_divergence": -1.0}, "must be at least 0"),
    ({"correction": "opsm", "age_tightening": -1.0}, "must be at least 0"),
    ({"beta": -0.1}, "must be at least 0"),
    ({"overlong_buffer": -1}, "must be at least 0"),
    ({"overlong_buffer": 4, "overlong_penalty": -1.0}, "must be at least 0"),
    ({"ess_lr": 0.0}, "must be above 0"),
    ({"ess_lr": 2.0}, "must be at most 1"),
    ({"clip_low": float("nan")}, "must be at least 0"),
]


@pytest.mark.parametrize(("keys", "remedy"), REFUSED, ids=lambda v: str(v)[:60])
def test_what_does_not_mean_what_it_says_is_refused(keys, remedy):
    found = problems(Algorithm(**keys))
    assert any(remedy in problem for problem in found), found
    assert all("\n" not in problem for problem in found)


@pytest.mark.parametrize("objective", sorted(set(OBJECTIVES) - WITHOUT_RATIO))
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_ratio_on_the_behaviour_anchor_is_not_corrected_twice(objective, correction):
    found = problems(Algorithm(objective=objective, correction=correction))
    assert [("correct twice" in p) for p in found] == [True] * (correction in WEIGHTS)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_synchronous_runs_need_no_correction_and_may_have_one(correction):
    assert problems(Algorithm(objective="reinforce"), target_lag=0) == []
    assert problems(Algorithm(objective="reinforce", correction=correction), target_lag=0) == []


def test_a_proximal_policy_needs_minibatches_and_then_means_something():
    algo = Algorithm(anchor="proximal", correction="token_tis")
    assert problems(algo, minibatches=2) == []
    assert "the clip never acts" in problems(algo, minibatches=1)[0]
    assert problems(Algorithm(anchor="interpolated", correction="token_tis")) == []


def test_a_class_with_its_own_objective_keeps_the_other_stages():
    assert problems(OwnObjective()) == []
    assert problems(OwnObjective(margin=0.5, correction="token_tis", beta=0.1, kl="k3")) == []
    assert "OwnObjective defines its own" in problems(OwnObjective(objective="cispo"))[0]
    assert "not by OwnObjective" in problems(OwnObjective(clip_high=0.5))[0]


def test_a_class_with_its_own_loss_refuses_the_keys_of_stages_it_replaces():
    assert problems(OwnLoss(aggregation="sequence_mean", dynamic_sampling=True)) == []
    for keys in ({"beta": 0.1}, {"correction": "token_tis"}, {"anchor": "interpolated"}, {"objective": "cispo"}):
        assert "OwnLoss defines a loss of its own" in problems(OwnLoss(**keys))[-1]


class OwnKeys(Algorithm):
    clip_high: float = 0.3
    beta: float = 0.0

    def loss(self, logprobs_T, batch):
        return -batch.advantages_T * logprobs_T * (1 + self.clip_high), {}


def test_a_class_with_its_own_loss_may_declare_keys_of_the_same_names():
    assert problems(OwnKeys(clip_high=0.5, beta=0.1)) == []
    assert checks.used_keys(OwnKeys(clip_high=0.5)) == {"clip_high": 0.5}
    assert "not by OwnKeys" in problems(OwnKeys(clip_low=0.5))[0]


def test_a_class_with_its_own_advantages_may_have_groups_of_one():
    assert problems(OwnAdvantages(n_samples=1)) == []
    assert problems(OwnAdvantages(advantage="raw")) == [
        "algo.advantage has no effect: OwnAdvantages defines its own; leave it out"
    ]


def test_a_loss_module_averages_over_micro_batches():
    cls = as_algorithm(ReinforceLoss)
    assert problems(cls(clip_ratio=0.1)) == []
    with pytest.raises(ValueError, match="must be one of token_mean, sequence_mean"):
        cls(aggregation="constant").check(training=TrainingConfig(), replay=ReplayConfig())


def test_another_objective_than_the_presets_starts_from_its_own_bounds():
    from asyncrl.algos.dapo import DAPO
    from asyncrl.algos.reinforce import Reinforce

    assert problems(DAPO(objective="cispo")) == []
    assert checks.used_keys(DAPO(objective="cispo")) == {"weight_max": 5.0}
    assert checks.used_keys(Reinforce(correction="icepop")) == {"correction_low": 0.5, "correction_high": 5.0}
    assert "clip_high" in problems(DAPO(objective="cispo", clip_high=0.4))[0]
    assert checks.used_keys(DAPO(clip_high=0.4))["clip_high"] == 0.4
