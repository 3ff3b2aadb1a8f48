#!/usr/bin/env bash
# Runs the GPU session that README.md describes: session.sh OUT [PYTHON]
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-.venv/bin/python}
cd "$(dirname "$0")/../.." || exit 1

step() { # name, limit in seconds, command...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $((SECONDS - began)) s: $(tail -n 1 "$out/$name.log")" | tee -a "$out/summary.txt"
}

run_tests() { # name, limit, files...
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" -m pytest -q -m gpu --durations=10 "$@"
}

: > "$out/summary.txt"
"$python" tests/lab/shapes.py "$out"
run_tests drafters 300 tests/gpu/test_drafters_cuda.py
run_tests runner 150 tests/gpu/test_model_runner_cuda.py
run_tests plans 120 tests/gpu/test_lazy_plan_cuda.py
export TRITON_CACHE_DIR="$out/triton" # empty, so that the first starts compile all kernels
step start-cold 90 "$python" tests/lab/startup.py "$out/llama-8b"
step start-warm 90 "$python" tests/lab/startup.py "$out/llama-8b"
step start-eagle3 90 "$python" tests/lab/startup.py "$out/llama-8b" "$out/eagle3-8b"
step start-eagle3-warm 90 "$python" tests/lab/startup.py "$out/llama-8b" "$out/eagle3-8b"
run_tests start-tests 150 tests/gpu/test_startup_cuda.py
run_tests attention 330 tests/gpu/test_attention_cuda.py
run_tests fp8-cache 120 tests/gpu/test_fp8_cache_cuda.py
run_tests deepseek-v4 150 tests/gpu/test_compressed_cuda.py
run_tests listed 250 tests/gpu/test_listed_cuda.py
run_tests experts 300 tests/gpu/test_expert_models_cuda.py tests/gpu/test_packed_experts_cuda.py tests/gpu/test_grouped_experts_cuda.py
run_tests batch-invariant 240 tests/gpu/test_batch_invariant.py
run_tests kernels 250 tests/gpu/test_kernels_cuda.py tests/gpu/test_linear_cuda.py \
  tests/gpu/test_packed_cuda.py tests/gpu/test_row_layer_cuda.py tests/gpu/test_hopper_product_cuda.py \
  tests/gpu/test_rotary_attention_cuda.py \
  tests/gpu/test_sampling_cuda.py tests/gpu/test_recurrent_cuda.py
