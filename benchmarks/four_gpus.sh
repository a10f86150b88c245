#!/bin/bash
# The whole engine on one machine with several GPUs: FSDP2 ranks, vLLM replicas, one of which is killed on the way.
#
#   benchmarks/four_gpus.sh              4 GPUs: 2 trainer ranks, 2 vLLM replicas; once one replica of 2 workers
#   benchmarks/four_gpus.sh --gpus 2     2 GPUs: 1 rank, 1 replica, what the 4 are compared with; and 2 ranks with a
#                                        replica that shares the second's GPU, which is killed on the way
#   benchmarks/four_gpus.sh --gpus 1     1 GPU: rank and replica share it; the replica is killed on the way
#   benchmarks/four_gpus.sh --smoke      2 ranks, 2 generators on the CPU with a small model: that it runs, not how fast
#
# MODELS="qwen3-1.7b llama-3-8b" and STEPS=20 may be set. Models have random weights: the shapes are real, the reward
# is noise. One rank alone cannot hold llama-3-8b with its Adam state (128 GB): it has no run of 1 rank. Each run
# prints a table beside the raw broadcast to the same ranks, then a line of JSON; exit code 1 when a ledger did not close
# or a killed generator did not come back.
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=4 smoke= steps=${STEPS:-20} models=${MODELS:-"qwen3-1.7b llama-3-8b"}
while [ $# -gt 0 ]; do
  case "$1" in
    --gpus) gpus=$2; shift 2 ;;
    --smoke) smoke=1; shift ;;
    *) echo "usage: benchmarks/four_gpus.sh [--gpus 1|2|4] [--smoke]" >&2; exit 2 ;;
  esac
done
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${OUT:-$(mktemp -d)} engine=vllm device=cuda options=()
if [ -n "$smoke" ]; then
  models=small steps=${STEPS:-6} engine=local device=cpu
  options=(--training.dtype float32 --generation.max-tokens 8 --generation.max-concurrency 16 --training.seq-len 64)
fi
[ "$gpus" != 1 ] || export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
status=0

# run MODEL NAME RANKS REPLICAS WORKERS VICTIM: one training run; generator VICTIM is killed after step 3 ("-": none)
run() {
  local folder="$out/$1-$2" more=("${options[@]}")
  [ "$1" != llama-3-8b ] || more+=(--training.activation-checkpointing true --training.tokens-per-micro-batch 8192)
  echo "== $1, $2: $3 trainer ranks, $4 replicas of $5"
  local killer=
  if [ "$6" != - ]; then
    "$python" benchmarks/gpu_run.py kill "$folder" --generator "$6" --after 3 &
    killer=$!
  fi
  "$python" -m asyncrl train --algo dapo --algo.dynamic-sampling false --env arithmetic --model "$out/$1" \
    --run-dir "$folder" --training.steps "$steps" --training.batch-size 16 --algo.n-samples 8 \
    --generation.engine "$engine" --generation.max-tokens 256 --checkpoint.every 0 \
    --services.trainer.procs "$3" --services.generator.num-replicas "$4" --services.generator.procs "$5" \
    "${more[@]}" > "$folder.log" 2>&1 || { tail -n 20 "$folder.log"; kill $killer; status=1; return; }
  [ -z "$killer" ] || wait "$killer" || status=1
  "$python" benchmarks/gpu_run.py report "$folder" --raw "$(raw "$out/$1" $((1 + $4 * $5)))" || status=1
}

# raw FOLDER RANKS: GB/s of a plain broadcast of the model's bytes from one rank to the others; 0 within one GPU
raw() { [ "$gpus" = 1 ] && echo 0 || "$python" benchmarks/gpu_run.py raw "$1" --ranks "$2" --device "$device"; }

for model in $models; do
  "$python" benchmarks/gpu_run.py shape "$model" "$out/$model" --device "$device"
  if [ -n "$smoke" ]; then
    run "$model" smoke 2 2 1 1
  elif [ "$gpus" = 1 ]; then
    [ "$model" = llama-3-8b ] || run "$model" one 1 1 1 0
  elif [ "$gpus" = 2 ]; then
    [ "$model" = llama-3-8b ] || run "$model" two 1 1 1 -
    run "$model" shared 2 1 1 0
  else
    run "$model" four 2 2 1 1
    run "$model" tensor-parallel 2 1 2 -
  fi
done
exit $status
