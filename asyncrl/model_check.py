"""Can `model.path` be loaded? Looked at before any process starts, by file and header alone: neither torch nor
transformers is imported, and nothing is downloaded.

`checks.py` and `evaluate.py` call `check_model`. What it lets pass may still be refused by the library that loads it.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

TINY = "tiny"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Any of them is enough of a tokenizer to try; `tokenizer_config.json` alone is not."""
NO_VOCABULARY = {"ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"}
"""Tokenizers of bytes, which have no such file."""
HUB_TIMEOUT_S = 10.0


def check_model(path: str) -> None:
    """Raise ValueError, in one line, when there is no model at `path` or its files are not whole."""
    if path == TINY:
        return
    if not path:
        raise ValueError(f"model.path is empty: give a Hugging Face folder, a hub name, or {TINY!r}")
    folder = Path(path)
    if folder.is_dir():
        _check_folder(path, folder)
    elif folder.exists():
        raise ValueError(f"model.path: {path} is a file; give the folder that holds config.json and the weights")
    elif not HUB_NAME.fullmatch(path):
        raise ValueError(f"model.path: there is no folder {path}")
    else:
        _check_hub(path)


def _check_folder(path: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path: {path} holds no config.json, so it is no Hugging Face model")
    config = _json(folder / "config.json")
    if not any(next(folder.glob(name), None) for name in VOCABULARY) and not _needs_no_vocabulary(folder):
        raise ValueError(f"model.path: {path} holds no tokenizer (tokenizer.json or another vocabulary): save it there")
    named = config.get("transformers_weights")
    found = [folder / name for name in ([named] if isinstance(named, str) else WEIGHTS) if (folder / name).is_file()]
    if not found:
        raise ValueError(f"model.path: {path} holds no weights (none of {', '.join(WEIGHTS)})")
    for file in _shards(folder, found[0]):
        _check_weights(file)


def _needs_no_vocabulary(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    return file.is_file() and _json(file).get("tokenizer_class") in NO_VOCABULARY


def _shards(folder: Path, file: Path) -> Iterable[Path]:
    """The files that hold tensors: this one, or those that it lists."""
    if file.suffix != ".json":
        return [file]
    names = _json(file).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"model.path: {file} lists no weights")
    return [folder / str(name) for name in sorted(set(names.values()))]


def _check_weights(file: Path) -> None:
    """Whether the file is there and as long as its header says."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ValueError(f"model.path: {file} is missing, which the index beside it lists")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="np"):
                return
        with file.open("rb") as opened:
            head = opened.read(2)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model.path: {file} is damaged or cut off ({error}); copy it again") from None
    if not head or (head == b"PK" and not zipfile.is_zipfile(file)):
        raise ValueError(f"model.path: {file} is damaged or cut off; copy it again")


def _json(file: Path) -> dict:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise ValueError(f"model.path: {file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"model.path: {file} holds no JSON object")
    return found


def _check_hub(name: str) -> None:
    """A name of the hub: in the cache, or there for the asking. Offline, its weights must be in the cache too."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    def cached(*files: str) -> bool:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)

    if cached("config.json"):
        if constants.HF_HUB_OFFLINE and not cached(*WEIGHTS):
            raise ValueError(f"model.path: the weights of {name!r} are not in the cache, and HF_HUB_OFFLINE is set")
        return
    try:  # one request: downloads try again for half a minute where there is no network
        info = HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 (what a lost network raises differs from version to version of the library)
        reason = " ".join(next(iter(str(error).strip().splitlines()), type(error).__name__).split())
        raise ValueError(
            f"model.path: there is no folder {name}, and the hub could not be asked or has no such model: {reason}"
        ) from None
    if info.siblings is not None and all(file.rfilename != "config.json" for file in info.siblings):
        raise ValueError(f"model.path: {name!r} on the hub holds no config.json, so it is no Hugging Face model")
