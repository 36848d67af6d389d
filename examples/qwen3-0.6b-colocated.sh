#!/usr/bin/env bash
# GRPO, Qwen3-0.6B on DAPO-Math-17k, trainers and engines in turns on 2 GPUs.
#
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir data/dapo
#
# Needs 2 GPUs of 24 GB or more: 16 bytes a parameter over 2 trainers are 5 GB each.
# Cost: not yet run.
#
# MODEL, DATA, OUT: what is trained, on which prompts, where it is written. More flags go to the trainer.
# DRY_RUN=1 runs the same loop with a tiny model on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/qwen3-0.6b-colocated}
model=${MODEL:-Qwen/Qwen3-0.6B}
data=${DATA:-data/dapo/dapo-math-17k.jsonl}
place=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate)
size=(--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 4096
  --num-rollout 100 --max-tokens-per-gpu 9216 --sglang-mem-fraction-static 0.6)
if [ "${DRY_RUN:-0}" = 1 ]; then . examples/dry_run.sh qwen3; fi
"$python" train.py --train-backend fsdp "${place[@]}" \
  --hf-checkpoint "$model" --prompt-data "$data" --rm-type dapo_math \
  --use-dynamic-batch-size "${size[@]}" --rollout-temperature 1 \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
  --lr 1e-6 --lr-decay-style constant --output_dir "$out/run" "$@"
