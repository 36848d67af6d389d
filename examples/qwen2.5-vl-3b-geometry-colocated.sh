#!/usr/bin/env bash
# GRPO, Qwen2.5-VL-3B on Geometry3K, trainers and engines in turns on 2 GPUs.
#
#   hf download --repo-type dataset hiyouga/geometry3k --include "data/train-*" --local-dir data/geo
#
# Needs 2 GPUs of 80 GB; on one of 141 GB (--actor-num-gpus-per-node 1) a step of the same shape took 64 s with
# responses of 512 tokens (benchmarks/RESULTS.md; random weights).
# Cost: not yet run.
#
# MODEL, DATA, OUT: what is trained, on which prompts, where it is written. More flags go to the trainer.
# DRY_RUN=1 runs the same loop with a tiny model on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/qwen2.5-vl-3b-geometry}
model=${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}
data=${DATA:-data/geo/data}
place=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate)
size=(--rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 2048
  --num-rollout 60 --max-tokens-per-gpu 8192 --sglang-mem-fraction-static 0.5)
if [ "${DRY_RUN:-0}" = 1 ]; then . examples/dry_run.sh qwen2_5_vl; fi
"$python" train.py --train-backend fsdp "${place[@]}" \
  --hf-checkpoint "$model" --prompt-data "$data" --rm-type math \
  --use-dynamic-batch-size "${size[@]}" --rollout-temperature 1 \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
  --lr 1e-6 --lr-decay-style constant --output_dir "$out/run" "$@"
