"""The tiny model and loading by path."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.cli import main
from asyncrl.model_check import check_model
from asyncrl.models import CHARACTERS, build_model, load_tokenizer, save_tiny, tiny_config


def test_tiny_has_56_tokens_and_under_half_a_million_parameters():
    model = build_model("tiny", dtype=torch.float32)
    assert tiny_config().vocab_size == 56
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 500_000


def test_tiny_is_the_same_for_the_same_seed_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = (build_model("tiny", dtype=torch.float32, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "norm" in name or not torch.equal(a, c)


def test_character_tokens_round_trip_and_special_tokens_are_distinct():
    tokenizer = load_tokenizer("tiny")
    ids = tokenizer.encode(CHARACTERS, add_special_tokens=False)
    assert len(ids) == len(CHARACTERS) == len(set(ids))
    assert tokenizer.decode(ids) == CHARACTERS
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, *ids}) == len(ids) + 3
    assert tokenizer.encode("sort 31420=\n") == tokenizer("sort 31420=\n")["input_ids"]


def test_text_cannot_spell_a_special_token_out_of_known_characters():
    tokenizer = load_tokenizer("tiny")
    assert tokenizer.eos_token_id not in tokenizer.encode("<eos> < | eos | >")
    assert tokenizer.unk_token_id in tokenizer.encode("A")


def test_tiny_saved_to_a_folder_loads_as_any_model_does(tmp_path):
    save_tiny(tmp_path, seed=3)
    model = build_model(str(tmp_path), dtype=torch.float32)
    expected = build_model("tiny", dtype=torch.float32, seed=3)
    ids = torch.tensor([load_tokenizer(str(tmp_path)).encode("sort 312=")])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_empty_model_has_the_structure_and_ties_of_the_real_one(device):
    empty = build_model("tiny", dtype=torch.bfloat16, device=device, weights=False)
    real = build_model("tiny", dtype=torch.bfloat16)
    shapes = {n: (p.shape, p.dtype) for n, p in real.named_parameters()}
    assert {n: (p.shape, p.dtype) for n, p in empty.named_parameters()} == shapes
    assert empty.lm_head.weight is empty.model.embed_tokens.weight


def test_an_empty_model_equals_the_real_one_once_it_has_its_weights():
    empty = build_model("tiny", dtype=torch.float32, weights=False)
    real = build_model("tiny", dtype=torch.float32)
    with torch.no_grad():
        for a, b in zip(empty.parameters(), real.parameters(), strict=True):
            a.copy_(b)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(empty(ids).logits, real(ids).logits)


def test_an_unknown_path_is_a_value_error_that_names_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="no-such-folder"):
        build_model("./no-such-folder", dtype=torch.float32)
    with pytest.raises(ValueError, match="no-such-folder"):
        load_tokenizer("./no-such-folder")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def list_a_shard_that_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (shutil.rmtree, "there is no folder"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (cut_off, "model.safetensors is damaged or cut off"),
        (list_a_shard_that_is_missing, "model-00001-of-00001.safetensors is missing"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], complaint: str
) -> None:
    model, run_dir = save_tiny(tmp_path / "model"), tmp_path / "run"
    check_model(str(model))
    damage(model)
    capsys.readouterr()  # the progress of saving
    for command in (["train"], ["train", "--dry-run"], ["eval"]):
        assert main([*command, "--model", str(model), "--run-dir", str(run_dir)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "model.path" in said
        assert complaint in said
        assert not run_dir.exists()


def test_a_name_that_is_neither_a_folder_nor_in_the_cache_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"model\.path: there is no folder nobody/nothing.*offline"):
        check_model("nobody/nothing")
    for path in ("./nothing", "/no/where", "a/b/c", "~/x"):
        with pytest.raises(ValueError, match=r"model\.path: there is no folder [^,]*$"):
            check_model(path)
