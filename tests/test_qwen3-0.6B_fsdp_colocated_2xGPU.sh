#!/usr/bin/env bash
# examples/qwen3-0.6b-colocated.sh under the name that published set-ups have for it: GRPO, Qwen3-0.6B on
# DAPO-Math-17k, trainers and engines in turns on 2 GPUs. DRY_RUN=1 runs it with a tiny model on a CPU.
exec "$(dirname "$0")/../examples/qwen3-0.6b-colocated.sh" "$@"
