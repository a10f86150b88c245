#!/bin/sh
# Make .venv-adapters: the environment libraries that asyncrl adapts, beside .venv. `make adapters` calls it from the
# repository root once .venv is there. To use one of them: pip install 'asyncrl[reasoning-gym]' (gymnasium, textarena, verifiers).
set -eu

env=.venv-adapters
sh scripts/beside.sh "$env"
.venv/bin/python -m pip --python "$env/bin/python" install --quiet --no-compile -r scripts/adapters.txt
touch "$env/.ready"
