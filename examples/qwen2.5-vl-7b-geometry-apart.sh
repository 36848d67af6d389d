#!/usr/bin/env bash
# GRPO, Qwen2.5-VL-7B on Geometry3K: 4 GPUs train, 4 generate, in step (train_async.py: one rollout ahead).
#
#   hf download --repo-type dataset hiyouga/geometry3k --include "data/train-*" --local-dir data/geo
#
# Needs 8 GPUs of 80 GB: 16 bytes a trained parameter (the tower is frozen) over 4 trainers are 31 GB each.
# Cost: not yet run.
#
# MODEL, DATA, OUT: what is trained, on which prompts, where it is written. More flags go to the trainer.
# DRY_RUN=1 runs the same loop with a tiny model on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/qwen2.5-vl-7b-geometry}
model=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}
data=${DATA:-data/geo/data}
place=(--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4)
size=(--rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 2048
  --num-rollout 60 --max-tokens-per-gpu 8192 --grad_ckpt auto --sglang-mem-fraction-static 0.8)
if [ "${DRY_RUN:-0}" = 1 ]; then . examples/dry_run.sh qwen2_5_vl; fi
"$python" train.py --train-backend fsdp "${place[@]}" \
  --hf-checkpoint "$model" --prompt-data "$data" --rm-type math \
  --use-dynamic-batch-size "${size[@]}" --rollout-temperature 1 \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
  --lr 1e-6 --lr-decay-style constant --output_dir "$out/run" "$@"
