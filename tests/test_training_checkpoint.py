"""Checkpoints: complete or not there, equal after a resume, on another number of ranks too, and loadable elsewhere."""

import logging
import shutil

import pytest
import torch
from test_training_step import batch
from training_helpers import config_for, lone_rank, make_learner, run_ranks

from asyncrl.algos.dapo import DAPO
from asyncrl.config import CheckpointConfig
from asyncrl.models import build_model, load_tokenizer
from asyncrl.training.checkpoint import Checkpointer, Position, is_complete
from asyncrl.training.export import export


def learner_and_writer(folder, ranks=None, **training):
    ranks = ranks or lone_rank()
    config = config_for(learning_rate=1e-2, **training)
    learner = make_learner(DAPO(), config, ranks)
    return learner, Checkpointer(folder, config=config.checkpoint, ranks=ranks)


def weights(learner):
    return {n: p.detach().full_tensor().clone() for n, p in learner.policy.named_parameters()}


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    learner, writer = learner_and_writer(tmp_path)
    sequences = batch(learner.algo, learner.config)
    learner.train(sequences, step=1)
    writer.save(learner.policy, learner.optimizer, Position(step=1, version=1))
    expected = learner.train(sequences, step=2)  # while it is being written
    writer.wait()
    other, reader = learner_and_writer(tmp_path)
    path = reader.newest()
    assert path.name == "step-000001"
    assert reader.load(path, other.policy, other.optimizer) == Position(step=1, version=1)
    assert other.train(sequences, step=2) == expected
    assert all(torch.equal(w, weights(learner)[n]) for n, w in weights(other).items())
    writer.close()
    reader.close()


def save(learner, writer, *steps):
    for step in steps:
        writer.save(learner.policy, learner.optimizer, Position(step=step, version=step))
    writer.wait()


def damage(path):
    """One bit of the weights."""
    data = max(path.glob("*.distcp"), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_an_incomplete_or_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog):
    learner, writer = learner_and_writer(tmp_path)
    save(learner, writer, 1, 2, 3)
    assert [p.name for p in writer.steps()] == ["step-000002", "step-000003"]  # keep_last 2
    damage(writer.steps()[-1])
    with caplog.at_level(logging.WARNING):
        assert writer.newest().name == "step-000002"
    assert "step-000003 is incomplete or damaged: skipped" in caplog.text
    (writer.steps()[0] / "COMPLETE").unlink()
    with pytest.raises(ValueError, match="step-000002, step-000003 incomplete or damaged; put a copy of one there"):
        writer.newest()  # to start afresh would delete what the run has done
    writer.close()


def test_a_folder_that_was_being_written_is_skipped_with_a_warning_and_replaced(tmp_path, caplog):
    learner, writer = learner_and_writer(tmp_path)
    parts = [tmp_path / f".step-00000{step}.part" for step in (1, 7)]
    for part in parts:
        part.mkdir(parents=True)
        (part / "junk").write_text("half a file")
    with caplog.at_level(logging.WARNING):
        assert writer.newest() is None
    assert all(f"{part} was never finished: skipped" in caplog.text for part in parts)
    save(learner, writer, 1)
    assert not any(part.exists() for part in parts)
    assert is_complete(writer.newest())
    assert not (writer.newest() / "junk").exists()
    writer.close()


def test_the_last_n_and_every_mth_checkpoint_are_kept(tmp_path):
    learner, _ = learner_and_writer(tmp_path)
    config = CheckpointConfig(every=2, keep_last=2, keep_every=3)
    writer = Checkpointer(tmp_path, config=config, ranks=lone_rank())
    save(learner, writer, *range(2, 17, 2))
    assert [int(p.name[-6:]) for p in writer.steps()] == [6, 12, 14, 16]
    assert writer.oldest_step(until=16) == 14  # the journal need not reach back to those that are kept for good
    writer.close()


def test_damaged_checkpoints_of_a_future_that_was_given_up_cost_no_good_one(tmp_path):
    learner, writer = learner_and_writer(tmp_path)
    save(learner, writer, 2, 9)
    shutil.copytree(tmp_path / "step-000009", tmp_path / "step-000008")
    for step in (8, 9):
        damage(tmp_path / f"step-00000{step}")
    assert writer.newest().name == "step-000002"
    save(learner, writer, 3, 4)
    assert writer.newest().name == "step-000004"
    assert writer.oldest_step(until=4) == 3
    save(learner, writer, 9)  # reached again: written over
    assert writer.newest().name == "step-000009"
    assert not list(tmp_path.glob(".step*"))
    writer.close()


SCRIPT = """
import sys
from training_helpers import *
from test_training_checkpoint import *
ranks = lone_rank()
learner, writer = learner_and_writer(Path(sys.argv[1]), ranks)
writer.load(writer.newest(), learner.policy, learner.optimizer)
learner.train(batch(learner.algo, learner.config), step=2)
writer.save(learner.policy, learner.optimizer, Position(step=2, version=2))
writer.close()
"""


def test_a_checkpoint_is_resumed_on_another_number_of_ranks_and_back(tmp_path):
    learner, writer = learner_and_writer(tmp_path)
    sequences = batch(learner.algo, learner.config)
    learner.train(sequences, step=1)
    writer.save(learner.policy, learner.optimizer, Position(step=1, version=1))
    writer.close()
    run_ranks(SCRIPT, 3, str(tmp_path))  # three divides no dimension: shards of unequal size
    learner.train(sequences, step=2)
    other, reader = learner_and_writer(tmp_path)
    assert reader.load(reader.newest(), other.policy, other.optimizer).step == 2
    for name, wanted in weights(learner).items():
        torch.testing.assert_close(weights(other)[name], wanted, rtol=1e-4, atol=1e-5)
    reader.close()


def test_the_export_loads_in_transformers(tmp_path):
    learner, _ = learner_and_writer(tmp_path)
    learner.train(batch(learner.algo, learner.config), step=1)
    folder = tmp_path / "model"
    for _ in range(2):  # the second replaces the first
        export(
            learner.policy,
            folder,
            path="tiny",
            tokenizer=load_tokenizer("tiny"),
            dtype=torch.float32,
            ranks=lone_rank(),
        )
    model, tokenizer = build_model(str(folder), dtype=torch.float32), load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode("sort 31=")) == "sort 31="
    ours = weights(learner)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.data, ours[f"lm.{name}"], rtol=0, atol=0)
    assert not list(tmp_path.glob(".model*"))


def test_adapters_are_saved_and_restored(tmp_path):
    config = config_for(learning_rate=1e-2)
    config.training.lora.rank = 4
    first, second = (make_learner(DAPO(), config, lone_rank()) for _ in range(2))
    writer = Checkpointer(tmp_path, config=config.checkpoint, ranks=lone_rank())
    sequences = batch(first.algo, config)
    first.train(sequences, step=1)
    writer.save(first.policy, first.optimizer, Position(step=1, version=1))
    writer.wait()
    writer.load(writer.newest(), second.policy, second.optimizer)
    assert second.train(sequences, step=2) == pytest.approx(first.train(sequences, step=2))
    writer.close()
