#!/usr/bin/env bash
# GRPO, the mixture of experts Qwen3-30B-A3B on DAPO-Math-17k, in turns on 8 GPUs of 141 GB (H200).
#
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir data/dapo
#
# Memory, by 30.5 B parameters: 16 bytes each are 488 GB, 61 GB a trainer; a rank's gathered layer, its gradients and
# recomputed activations come on top. An engine a GPU holds all weights in bfloat16, 61 GB, while trainers are in host
# memory: 488 GB of it. With 80 GB a GPU take two machines (`ray start` on both, --actor-num-nodes 2: 31 GB a trainer)
# and engines of 2 GPUs (--rollout-num-gpus-per-engine 2), whose weights go by disk.
# With several trainers weights go through host memory: 61 GB an engine and step, minutes rather than seconds.
# Cost: not yet run.
#
# MODEL, DATA, OUT: what is trained, on which prompts, where it is written. More flags go to the trainer.
# DRY_RUN=1 runs the same loop with a tiny model on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/qwen3-30b-a3b}
model=${MODEL:-Qwen/Qwen3-30B-A3B}
data=${DATA:-data/dapo/dapo-math-17k.jsonl}
place=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)
size=(--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
  --num-rollout 100 --max-tokens-per-gpu 9216 --grad_ckpt full --sglang-mem-fraction-static 0.6)
if [ "${DRY_RUN:-0}" = 1 ]; then . examples/dry_run.sh qwen3_moe; fi
"$python" train.py --train-backend fsdp "${place[@]}" \
  --hf-checkpoint "$model" --prompt-data "$data" --rm-type dapo_math \
  --use-dynamic-batch-size "${size[@]}" --rollout-temperature 1 \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
  --lr 1e-6 --lr-decay-style constant --output_dir "$out/run" "$@"
