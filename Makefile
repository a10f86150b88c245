# The only set-up there is. Needs Python 3.11 or newer; everything goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
RUN_DIR ?= runs/demo

.PHONY: all demo test lint vllm clean

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

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy asyncrl algos envs

clean:
	rm -rf .venv build dist *.egg-info
