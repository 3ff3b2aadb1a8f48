#!/usr/bin/env bash
# Checks and measures tensor parallelism on two GPUs: parallel.sh OUT [PYTHON]
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-.venv/bin/python}
cd "$(dirname "$0")/../.." || exit 1
# NVLink multicast can put the GPUs of a shared host out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD/.src${PYTHONPATH:+:$PYTHONPATH}"

step() { # name, limit in seconds, command...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $((SECONDS - began)) s: $(tail -n 1 "$out/$name.log")" | tee -a "$out/summary.txt"
}

models=$(mktemp -d)
"$python" tests/lab/shapes.py "$models"
: > "$out/summary.txt"
step tests 240 "$python" -m pytest -q -rA -m gpu -p no:cacheprovider --durations=8 \
  tests/gpu/test_parallel_cuda.py
rates='"synthetic_acceptance_rates": [0.8, 0.6, 0.42]'
head="{\"method\": \"eagle3\", \"model\": \"$models/eagle3-8b\", \"num_speculative_tokens\": 3, \"load_format\": \"dummy\", $rates}"
for size in 1 2; do
  for drafts in off "$head"; do
    name=$([ "$drafts" = off ] && echo "off-tp$size" || echo "eagle3-tp$size")
    step "$name" 75 "$python" -m slipstream.server.commands bench offline "$models/llama-8b" \
      --load-format dummy --batch-sizes 1,32,256 --input-len 128 --output-len 96 --num-iters 1 \
      --max-num-seqs 256 --max-num-batched-tokens 8192 --max-model-len 1024 -tp "$size" -sc "$drafts"
  done
done
rm -rf "$models"
grep -h "tok/s\|tokens/s\|^ *[0-9]" "$out"/off-tp?.log "$out"/eagle3-tp?.log
