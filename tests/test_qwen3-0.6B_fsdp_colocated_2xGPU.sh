#!/usr/bin/env bash
# GRPO on 2 GPUs that trainer and engine share, Qwen3-0.6B on DAPO-Math-17k:
#
#   tests/test_qwen3-0.6B_fsdp_colocated_2xGPU.sh [FLAGS of `vireo train` ...]
#
# MODEL, DATA, OUT: what is trained, on which prompts, where it is written.
# DRY_RUN=1: the same placement and loop on a CPU, with a tiny Qwen3 and the embedded engine as server.
#
# Not yet run on GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/qwen3-0.6B-colocated}
model=${MODEL:-Qwen/Qwen3-0.6B}
data=${DATA:-data/dapo/dapo-math-17k.jsonl}
size=(--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 4096
  --num-rollout 20 --max-tokens-per-gpu 9216 --sglang-mem-fraction-static 0.6)
if [ "${DRY_RUN:-0}" = 1 ]; then
  model=$out/model data=$out/prompts.jsonl
  mkdir -p "$out"
  [ -d "$model" ] || "$python" -m vireo tiny qwen3 "$model" --size test
  for i in 1 2 3 4 5 6; do
    echo "{\"prompt\": \"What is $i + $i? End with a line Answer: N\", \"label\": \"$((i + i))\"}"
  done > "$data"
  size=(--rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 8
    --num-rollout 2 --max-tokens-per-gpu 512 --engine serve)
fi
"$python" train.py \
  --train-backend fsdp --actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate \
  --hf-checkpoint "$model" --prompt-data "$data" --rm-type dapo_math \
  --use-dynamic-batch-size "${size[@]}" --rollout-temperature 1 \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
  --lr 1e-6 --lr-decay-style constant --output_dir "$out/run" "$@"
