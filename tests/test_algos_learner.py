"""Algorithms inside a real optimiser step on the tiny model: what of each token reaches the loss, what lr 0 shows."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from training_helpers import config_for, lone_rank, make_learner, random_groups

from asyncrl.algorithm import Algorithm, as_algorithm
from asyncrl.algos.dapo import DAPO
from asyncrl.algos.decoupled_ppo import DecoupledPPO
from asyncrl.algos.grpo import GRPO
from asyncrl.algos.m2po import M2PO
from asyncrl.losses.modules import ReinforceLoss
from asyncrl.training.batch import prepare
from asyncrl.training.reports import describe_groups

torch.set_num_threads(1)
VERSION, LAGS = 7, 4


class Spy(Algorithm):
    """REINFORCE that remembers what it was shown."""

    seen: ClassVar[list] = []

    def loss(self, logprobs_T, batch):
        self.seen.append(batch)
        return -batch.advantages_T * logprobs_T, {}


def prepared(algo, config, groups=None):
    config.replay.max_lag = LAGS
    algo.n_samples = 4
    groups = groups or random_groups(4, 4, version=VERSION, lags=LAGS)
    return groups, prepare(groups, algo=algo, config=config, step=VERSION + 1, version=VERSION)


def test_each_tokens_version_and_behaviour_reach_the_loss():
    learner = make_learner(Spy(), config_for(tokens_per_micro_batch=64), lone_rank())
    groups, sequences = prepared(learner.algo, learner.config)
    Spy.seen.clear()
    learner.train(sequences, step=8)
    assert len(Spy.seen) > 1, "several micro-batches"
    shown = sorted(
        (lag, round(mu, 6))
        for batch in Spy.seen
        for lag, mu in zip(batch.lags_T.tolist(), batch.behaviour_T.tolist(), strict=True)
    )
    wanted = sorted(
        (VERSION - int(version), round(float(mu), 6))
        for group in groups
        for e in group.episodes
        for version, mu in zip(e.versions[e.loss_mask], e.logprobs[e.loss_mask], strict=True)
    )
    assert shown == wanted
    assert len({lag for lag, _ in shown}) == LAGS


def test_tokens_without_a_log_probability_are_left_out_and_counted():
    groups = random_groups(2, 4, version=VERSION)
    episode = groups[0].episodes[0]
    where = np.flatnonzero(episode.loss_mask)[:1]
    episode.logprobs[where] = -np.inf
    whole = sum(int(e.loss_mask.sum()) for g in groups for e in g.episodes)
    _, sequences = prepared(DAPO(), config_for(), groups)
    assert sequences.trained_N.sum() == whole - 1
    assert describe_groups(groups)["tokens/not_finite"] == 1


def test_advantages_follow_their_groups_into_the_loss_whatever_the_order_of_arrival():
    config = config_for()
    groups, sequences = prepared(DAPO(), config)
    order = [2, 0, 3, 1]
    _, shuffled = prepared(DAPO(), config, [groups[i] for i in order])
    rows = sequences.advantages_B.reshape(4, 4)
    np.testing.assert_allclose(shuffled.advantages_B.reshape(4, 4), rows[order], rtol=1e-12)


def test_an_end_of_sequence_that_is_also_the_padding_token_is_trained():
    groups = random_groups(2, 4, version=VERSION)
    for group in groups:
        for episode in group.episodes:
            episode.token_ids[-1], episode.loss_mask[-1] = 0, True  # the tiny tokenizer's padding
            episode.versions[-1], episode.logprobs[-1] = VERSION, -1.0
    _, sequences = prepared(DAPO(), config_for(), groups)
    ends = np.cumsum(sequences.lengths_B) - 1
    assert sequences.trained_N[ends].all()


@pytest.mark.parametrize("algo", [DAPO(), M2PO(), as_algorithm(ReinforceLoss)()], ids=lambda a: type(a).__name__)
def test_a_learning_rate_of_zero_keeps_mismatch_flat(algo):
    learner = make_learner(algo, config_for(learning_rate=0.0), lone_rank())
    _, sequences = prepared(algo, learner.config)
    first, second = learner.train(sequences, step=8), learner.train(sequences, step=9)
    flat = [k for k in first if k.startswith(("mismatch/", "ratio/", "clip/"))]
    assert "mismatch/k3" in flat
    assert {k: first[k] for k in flat} == {k: second[k] for k in flat}


def test_a_proximal_anchor_sees_ratio_one_in_the_first_minibatch_and_moves_in_the_next():
    algo = DecoupledPPO(correction_high=1e8)
    learner = make_learner(algo, config_for(learning_rate=3e-2, minibatches=2, max_grad_norm=0.0), lone_rank())
    _, sequences = prepared(algo, learner.config)
    row = learner.train(sequences, step=8)
    assert 0 < row["clip/high"] + row["clip/low"] < 0.5, "only the second optimiser step can clip"


def test_a_penalty_reads_the_reference_and_is_logged():
    algo, stand_in = GRPO(), lambda micros: iter([m.batch.behaviour_T for m in micros])
    learner = make_learner(algo, config_for(), lone_rank(), reference=stand_in)
    _, sequences = prepared(algo, learner.config)
    assert learner.train(sequences, step=8)["policy/kl_ref"] > 0
    with pytest.raises(ValueError, match="needs a reference policy"):
        make_learner(GRPO(), config_for(), lone_rank())


def test_the_effective_sample_size_lowers_the_learning_rate():
    algo = DAPO(ess_lr=1.0)
    learner = make_learner(algo, config_for(learning_rate=1e-4), lone_rank())
    _, sequences = prepared(algo, learner.config)
    row = learner.train(sequences, step=8)
    assert row["optimizer/learning_rate"] == pytest.approx(1e-4 * row["ratio/ess_sequence"] ** 0.5, rel=1e-6)
    assert row["ratio/ess_sequence"] < 1


def test_metrics_of_the_loss_are_logged_by_lag():
    algo = DAPO()
    learner = make_learner(algo, config_for(), lone_rank())
    _, sequences = prepared(algo, learner.config)
    row = learner.train(sequences, step=8)
    for name in ("clip/high", "ratio/ess", "mismatch/k3"):
        parts = [row[f"{name}_by_lag/{lag}"] * row[f"tokens_by_lag/{lag}"] for lag in range(LAGS)]
        if name != "ratio/ess":
            assert sum(parts) / row["tokens/trained"] == pytest.approx(row[name], abs=1e-6)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda loss_T: loss_T, "must return a loss per token and a dict of metrics"),
        (lambda loss_T: (loss_T, None), "must return a loss per token and a dict of metrics"),
        (lambda loss_T: (loss_T, {"mine": 0.5}), r"metric 'mine' must be a tensor of one value per token.*got float"),
        (
            lambda loss_T: (loss_T, {"mine": loss_T.mean()}),
            r"metric 'mine' .*got Tensor of shape \(\)",
        ),
    ],
)
def test_a_surrogate_that_returns_something_else_hears_what_was_expected(returned, said):
    class Mine(DAPO):
        def surrogate(self, tokens):
            return returned(-tokens.advantages_T * tokens.logprobs_T)

    learner = make_learner(Mine(), config_for(), lone_rank())
    _, sequences = prepared(learner.algo, learner.config)
    with pytest.raises(ValueError, match=said):
        learner.train(sequences, step=8)
