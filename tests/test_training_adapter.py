"""Adapters in peft's format: on top of the base model they are the model that is exported merged."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from test_training_step import batch
from training_helpers import config_for, lone_rank, make_learner, run_ranks, save_random_model

from asyncrl.algos.dapo import DAPO
from asyncrl.cli import main
from asyncrl.models import build_model, load_tokenizer
from asyncrl.training.export import export, export_adapter
from asyncrl.training.ranks import Ranks

TUNED = {"all-linear": 7, "q_proj,v_proj": 2}
"""target_modules -> adapted modules of each layer."""


def train_and_export(folder: Path, base: str, modules: str, ranks: Ranks | None = None) -> None:
    """Two steps with adapters, on all ranks of this world; then folder/model and folder/adapter."""
    ranks = ranks or lone_rank()
    config = config_for(base, learning_rate=1e-2)
    config.training.lora.rank, config.training.lora.alpha, config.training.lora.target_modules = 4, 12.0, modules
    learner = make_learner(DAPO(), config, ranks)
    for step in (1, 2):
        learner.train(batch(learner.algo, config), step=step)
    tokenizer = load_tokenizer("tiny")
    kept = {"path": base, "ranks": ranks}
    export(learner.policy, folder / "model", tokenizer=tokenizer, dtype=torch.float32, **kept)
    for _ in range(2):  # the second replaces the first
        export_adapter(learner.policy, folder / "adapter", config=config.training.lora, **kept)


SCRIPT = """
import sys
from test_training_adapter import *
train_and_export(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
"""


@pytest.mark.parametrize(("num_ranks", "modules"), [(1, "all-linear"), (1, "q_proj,v_proj"), (2, "all-linear")])
def test_peft_makes_of_the_base_model_and_the_adapter_the_model_that_was_trained(
    tmp_path: Path, num_ranks: int, modules: str
) -> None:
    base = save_random_model(tmp_path / "base", "Llama")
    if num_ranks == 1:
        train_and_export(tmp_path, base, modules)
    else:
        run_ranks(SCRIPT, num_ranks, str(tmp_path), base, modules)
    ids = torch.arange(3, 40)[None]
    plain, merged = (build_model(path, dtype=torch.float32) for path in (base, str(tmp_path / "model")))
    before, wanted = plain(ids).logits, merged(ids).logits
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    factors = [name for name, _ in adapted.named_parameters() if ".lora_" in name]
    assert len(factors) == 2 * 2 * TUNED[modules]
    torch.testing.assert_close(adapted(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    assert (before - wanted).abs().max() > 1e-2
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["base_model_name_or_path"], said["r"], said["lora_alpha"]) == (base, 4, 12.0)
    assert (said["task_type"], said["peft_type"], len(said["target_modules"])) == ("CAUSAL_LM", "LORA", TUNED[modules])
    assert not list(tmp_path.glob(".adapter*"))


@pytest.mark.slow
def test_a_run_leaves_its_adapter_beside_the_merged_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--run-dir", str(tmp_path / "run"), "--training.lora.rank", "2", "--training.steps", "2"]
    assert main(["sft", *argv]) == 0
    assert {file.name for file in (tmp_path / "run" / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert f"adapter     {tmp_path / 'run' / 'adapter'}" in capfd.readouterr().out
