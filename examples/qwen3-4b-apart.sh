#!/usr/bin/env bash
# GRPO, Qwen3-4B on DAPO-Math-17k: 4 GPUs train, 4 generate, one rollout ahead of training.
#
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir data/dapo
#
# Needs 8 GPUs of 80 GB: 16 bytes a parameter over 4 trainers are 16 GB each, activations beside them.
# Tokens of older weights are corrected by truncated importance sampling.
# Cost: not yet run.
#
# MODEL, DATA, OUT: what is trained, on which prompts, where it is written. More flags go to the trainer.
# DRY_RUN=1 runs the same loop with a tiny model on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/qwen3-4b-apart}
model=${MODEL:-Qwen/Qwen3-4B}
data=${DATA:-data/dapo/dapo-math-17k.jsonl}
place=(--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4)
size=(--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
  --num-rollout 200 --max-tokens-per-gpu 9216 --sglang-mem-fraction-static 0.8)
if [ "${DRY_RUN:-0}" = 1 ]; then . examples/dry_run.sh qwen3; fi
"$python" train_async.py --train-backend fsdp "${place[@]}" \
  --hf-checkpoint "$model" --prompt-data "$data" --rm-type dapo_math \
  --use-dynamic-batch-size "${size[@]}" --rollout-temperature 1 \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --use-tis \
  --lr 1e-6 --lr-decay-style constant --output_dir "$out/run" "$@"
