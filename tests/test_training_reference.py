"""The reference policy is the one the run began with, and stays it; the warm-up learns its demonstrations."""

import numpy as np
import pytest
import torch
from test_training_step import batch
from training_helpers import config_for, gradients, lone_policy, lone_rank, make_learner

from asyncrl.algos.grpo import GRPO
from asyncrl.chat import Chat
from asyncrl.envs.sort_digits import SortDigits
from asyncrl.models import load_tokenizer
from asyncrl.training.batch import micro_batches
from asyncrl.training.ranks import make_mesh
from asyncrl.training.reference import make_reference
from asyncrl.training.sft import Demonstrations, examples, train_on_demonstrations


def with_reference(config):
    learner = make_learner(GRPO(beta=0.0), config, lone_rank())
    ranks = lone_rank()
    mesh = make_mesh(config.parallelism, ranks)
    reference = make_reference(config, learner.policy, ranks, mesh, initial="tiny", temperature=1.0)
    return learner, reference


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_stays_while_the_policy_moves(rank):
    config = config_for(learning_rate=1e-2)
    config.training.lora.rank = rank
    learner, reference = with_reference(config)
    sequences = batch(learner.algo, config)
    (micro,) = micro_batches(sequences, config=config, ranks=learner.ranks)[0]
    own = learner.policy(micro.inputs)[0].detach()
    torch.testing.assert_close(next(reference([micro])), own)
    for step in (1, 2):
        learner.train(sequences, step=step)
    torch.testing.assert_close(next(reference([micro])), own)
    assert (learner.policy(micro.inputs)[0].detach() - own).abs().max() > 1e-2


def test_the_penalty_is_zero_at_the_start_and_pulls_back_later():
    config = config_for(learning_rate=1e-2)
    plain, reference = with_reference(config)
    sequences = batch(plain.algo, config)
    pulled = make_learner(GRPO(beta=0.5), config, lone_rank(), reference=reference)
    first = gradients(plain, sequences)
    for name, gradient in gradients(pulled, sequences).items():
        torch.testing.assert_close(gradient, first[name], rtol=1e-4, atol=1e-5)
    rows = [[learner.train(sequences, step=s) for s in range(1, 6)] for learner in (plain, pulled)]
    assert rows[1][0]["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
    assert rows[1][-1]["policy/kl_ref"] > 0


def test_an_algorithm_that_needs_a_reference_is_not_trained_without():
    with pytest.raises(ValueError, match="needs a reference"):
        make_learner(GRPO(beta=0.1), config_for(), lone_rank())


def test_demonstrations_train_the_response_and_its_end_alone():
    chat = Chat(tokenizer=load_tokenizer("tiny"))
    ids, mask = next(examples(SortDigits(), chat))
    text = chat.tokenizer.decode(ids[mask])
    assert len(text.removesuffix("<|eos|>")) == 5
    assert text.endswith("<|eos|>")
    assert chat.tokenizer.decode(ids[~mask]).startswith("sort ")


def test_the_warm_up_learns_the_format():
    config, losses = config_for(tokens_per_micro_batch=512), []
    policy = lone_policy(config)
    train_on_demonstrations(
        policy,
        demonstrations=Demonstrations(SortDigits(), Chat(tokenizer=load_tokenizer("tiny")), longest=64),
        config=config.training,
        ranks=lone_rank(),
        steps=20,
        batch_size=64,
        rate=lambda step: 3e-3,
        on_step=lambda step, loss: losses.append(loss),
    )
    assert len(losses) == 20
    assert losses[0] == pytest.approx(np.log(60), rel=0.1)
    assert losses[-1] < 2.2
