"""One optimiser batch: the same gradients however it is cut, and nothing that is silently skipped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_helpers import config_for, gradients, lone_rank, make_learner, random_groups, run_ranks

from asyncrl.algos.dapo import DAPO
from asyncrl.algos.decoupled_ppo import DecoupledPPO
from asyncrl.algos.gspo import GSPO
from asyncrl.algos.m2po import M2PO
from asyncrl.training.batch import Sequences, micro_batches, prepare
from asyncrl.training.optimizer import learning_rate

VERSION, MAX_LAG = 7, 3


def batch(algo, config, *, num_groups=6, seed=0, groups=None):
    config.replay.max_lag = MAX_LAG
    algo.n_samples = 4
    groups = groups or random_groups(num_groups, 4, seed=seed, version=VERSION, lags=MAX_LAG + 1)
    return prepare(groups, algo=algo, config=config, step=VERSION + 1, version=VERSION)


def close(ours, theirs, *, tolerance=1e-5):
    assert set(ours) == set(theirs)
    for name, wanted in theirs.items():
        torch.testing.assert_close(ours[name], wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("algo", [DAPO(), GSPO(), M2PO()], ids=lambda a: type(a).__name__)
def test_any_cut_into_micro_batches_gives_the_same_gradients(algo):
    whole = make_learner(algo, config_for(tokens_per_micro_batch=10_000, entropy_coef=0.01), lone_rank())
    sequences = batch(algo, whole.config)
    assert len(micro_batches(sequences, config=whole.config, ranks=whole.ranks)[0]) == 1
    expected = gradients(whole, sequences)
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    for budget in (21, 64):
        whole.config.training.tokens_per_micro_batch = budget
        assert len(micro_batches(sequences, config=whole.config, ranks=whole.ranks)[0]) > 3
        close(gradients(whole, sequences), expected)


CASES = [(64, 1, 6), (10_000, 2, 6), (10_000, 1, 1)]
"""Tokens per micro-batch, replicas, groups; with one group some ranks have nothing to do."""
SCRIPT = """
import sys
from training_helpers import *
from test_training_step import CASES, ranks_gradients
ranks = lone_rank()
for case in CASES:
    ranks_gradients(ranks, *case, folder=sys.argv[1])
"""


def ranks_gradients(ranks, budget, replicate, num_groups, *, folder):
    """What SCRIPT runs on every rank: rank 0 writes whole gradients, loss and norm."""
    config = config_for(tokens_per_micro_batch=budget, entropy_coef=0.01)
    config.parallelism.data_parallel_replicate_degree = replicate
    learner = make_learner(M2PO(), config, ranks)
    data = batch(learner.algo, config, num_groups=num_groups).encode() if ranks.is_first else None
    sequences = Sequences.decode(ranks.broadcast(data))
    found = gradients(learner, sequences)
    row = learner.train(sequences, step=8)
    if ranks.is_first:
        found |= {"loss": torch.tensor(row["loss"]), "norm": torch.tensor(row["policy/grad_norm"])}
        save_file(found, f"{folder}/{budget}-{replicate}-{num_groups}.safetensors")


def test_two_ranks_sharded_or_replicated_give_the_gradients_of_one(tmp_path):
    run_ranks(SCRIPT, 2, str(tmp_path))
    for num_groups in (1, 6):
        one = make_learner(M2PO(), config_for(tokens_per_micro_batch=10_000, entropy_coef=0.01), lone_rank())
        sequences = batch(one.algo, one.config, num_groups=num_groups)
        expected = gradients(one, sequences)
        row = one.train(sequences, step=8)
        paths = list(tmp_path.glob(f"*-{num_groups}.safetensors"))
        assert paths
        for path in paths:
            found = load_file(path)
            assert found.pop("loss").item() == pytest.approx(row["loss"], rel=1e-5)
            assert found.pop("norm").item() == pytest.approx(row["policy/grad_norm"], rel=1e-5)
            close(found, expected)


def test_a_rank_with_nothing_to_do_takes_part(tmp_path):
    """One group of 4 sequences that fit one micro-batch, cut over 3 ranks with 3 micro-batches each."""
    algo = DAPO()
    config = config_for(gradient_accumulation_steps=9)
    learner = make_learner(algo, config, lone_rank())
    sequences = batch(algo, config, num_groups=1)
    cut = micro_batches(sequences, config=config, ranks=learner.ranks)[0]
    assert [m.num_tokens > 0 for m in cut].count(False) == 5
    expected = gradients(make_learner(algo, config_for(), lone_rank()), sequences)
    close(gradients(learner, sequences), expected)


def test_the_batch_survives_its_journey_as_bytes():
    sequences = batch(DAPO(), config_for())
    back = Sequences.decode(sequences.encode())
    for name in Sequences.__slots__:
        np.testing.assert_array_equal(getattr(back, name), getattr(sequences, name))


def test_training_moves_the_policy_towards_advantage():
    algo = DAPO()
    learner = make_learner(algo, config_for(learning_rate=1e-3), lone_rank())
    sequences = batch(algo, learner.config)
    row = learner.train(sequences, step=8)
    assert row["optimizer/skipped"] == 0
    assert row["policy/grad_norm"] > 0
    assert 0 < row["policy/entropy"] <= np.log(60)
    assert row["tokens/trained"] == sequences.trained_N.sum()
    assert sum(v for k, v in row.items() if k.startswith("tokens_by_lag/")) == row["tokens/trained"]
    assert {"ratio/mean", "ratio/max", "ratio/ess", "mismatch/k3", "clip/low"} <= set(row)
    assert all(np.isfinite(value) for value in row.values())
    assert learner.train(sequences, step=9)["loss"] < row["loss"]


def test_several_minibatches_are_several_steps_and_proximal_stays():
    algo = DecoupledPPO()
    learner = make_learner(algo, config_for(learning_rate=1e-2, minibatches=3), lone_rank())
    sequences = batch(algo, learner.config)
    assert sorted(np.bincount(sequences.minibatch_B)) == [8, 8, 8]
    before = [p.detach().full_tensor().clone() for p in learner.policy.parameters()]
    learner.train(sequences, step=8)
    after = [p.detach().full_tensor() for p in learner.policy.parameters()]
    assert all((a - b).abs().max() > 0 for a, b in zip(after, before, strict=True))
    assert learner.optimizer.state_dict()["state"][0]["step"].item() == 3


def test_weights_sum_over_each_minibatch():
    config = config_for(minibatches=2)
    sequences = batch(DAPO(), config)
    counts = np.add.reduceat(sequences.trained_N, np.cumsum(sequences.lengths_B) - sequences.lengths_B)
    for index in range(2):
        chosen = sequences.minibatch_B == index
        assert (sequences.weights_B * counts)[chosen].sum() == pytest.approx(1.0)


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted():
    algo = DAPO()
    learner = make_learner(algo, config_for(learning_rate=1e-2), lone_rank())
    sequences = batch(algo, learner.config)
    poisoned = replace(sequences, weights_B=np.full_like(sequences.weights_B, np.inf))
    before = [p.detach().full_tensor().clone() for p in learner.policy.parameters()]
    row = learner.train(poisoned, step=8)
    assert row["optimizer/skipped"] == 1
    assert not np.isfinite(row["policy/grad_norm"])
    assert all(
        torch.equal(p.detach().full_tensor(), b) for p, b in zip(learner.policy.parameters(), before, strict=True)
    )
    assert learner.train(sequences, step=9)["optimizer/skipped"] == 0


def test_nothing_to_train_is_no_step():
    algo = DAPO(overlong_mask=True)
    learner = make_learner(algo, config_for(learning_rate=1e-2), lone_rank())
    groups = random_groups(2, 4, version=VERSION)
    for group in groups:
        for episode in group.episodes:
            episode.finish_reason = "length"
    row = learner.train(batch(algo, learner.config, groups=groups), step=8)
    assert row["optimizer/skipped"] == 1
    assert row["tokens/trained"] == 0
    assert row["loss"] == 0


def test_a_masked_response_keeps_its_place_in_the_weights():
    groups = random_groups(2, 4, version=VERSION)
    groups[0].episodes[0].finish_reason = "length"
    masked = batch(DAPO(overlong_mask=True), config_for(), groups=groups)
    plain = batch(DAPO(), config_for(), groups=groups)
    np.testing.assert_array_equal(masked.weights_B, plain.weights_B)
    assert masked.trained_N.sum() < plain.trained_N.sum()


def test_infinite_log_probabilities_are_left_out():
    groups = random_groups(2, 4, version=VERSION)
    episode = groups[0].episodes[0]
    episode.loss_mask[0] = True
    episode.versions[0], episode.logprobs[0] = VERSION, -np.inf
    algo = DAPO()
    learner = make_learner(algo, config_for(), lone_rank())
    row = learner.train(batch(algo, learner.config, groups=groups), step=8)
    assert all(np.isfinite(value) for value in row.values())


def test_clipping_really_clips():
    algo = DAPO()
    for limit in (0.0, 1e-3):
        # With so large an epsilon AdamW's first step is the gradient itself.
        config = config_for(learning_rate=1e3, max_grad_norm=limit, adam_eps=1e3)
        learner = make_learner(algo, config, lone_rank())
        before = [p.detach().full_tensor().clone() for p in learner.policy.parameters()]
        norm = learner.train(batch(algo, config), step=8)["policy/grad_norm"]
        moved = [p.detach().full_tensor() - b for p, b in zip(learner.policy.parameters(), before, strict=True)]
        distance = torch.cat([m.flatten() for m in moved]).norm().item()
        assert distance == pytest.approx(limit or norm, rel=0.01)


@pytest.mark.parametrize("versions", [(VERSION + 1, 1), (VERSION - MAX_LAG - 1, 1)])
def test_staleness_beyond_the_bound_raises_at_consumption(versions):
    groups = random_groups(2, 4, version=versions[0])
    with pytest.raises(RuntimeError, match="broke its bound"):
        batch(DAPO(), config_for(), groups=groups)


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match=r"at most training\.seq_len = 5"):
        batch(DAPO(), config_for(seq_len=5))


def test_wrong_group_sizes_are_refused():
    with pytest.raises(RuntimeError, match="expected 4 in each"):
        batch(DAPO(), config_for(), groups=random_groups(2, 3, version=VERSION))


def test_the_schedule_rises_then_falls():
    config = config_for(learning_rate=1.0, warmup_steps=4, steps=14, schedule="linear").training
    rates = [learning_rate(config, step) for step in range(1, 15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    config.schedule = "cosine"
    assert learning_rate(config, 10) == pytest.approx(0.5)
