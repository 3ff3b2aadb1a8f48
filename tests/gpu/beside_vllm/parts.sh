#!/usr/bin/env bash
# Makes two folders that a machine without a network needs for call.sh: parts.sh FOLDER REQUIREMENTS
# FOLDER/part1 (41 MB) has what our server imports and the first part of vLLM 0.26.0, FOLDER/part2
# (41 MB) the rest. REQUIREMENTS is a list of what vLLM imports, one package==version a line. The
# machine has CPython 3.12, torch 2.11 and CUDA 13. Takes some minutes.
set -euo pipefail
folder=${1:?usage: parts.sh FOLDER REQUIREMENTS}
requirements=$(realpath "${2:?usage: parts.sh FOLDER REQUIREMENTS}")
mkdir -p "$folder/part1" "$folder/part2"
folder=$(realpath "$folder") here=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
flags=(--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --only-binary=:all:)
for minor in 39 35 34 31 28 27 26 24 17 12 5; do flags+=(--platform "manylinux_2_${minor}_x86_64"); done
flags+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
flags+=(--platform linux_x86_64)
install() { # folder, packages...
  local to=$1
  shift
  python3 -m pip install -q --no-deps --no-compile --target "$to" "${flags[@]}" "$@"
}

install runtime flashinfer-python==0.6.14 apache-tvm-ffi==0.1.15.post2 cuda-tile==1.7.0 \
  cuda-python==13.4.4 nvtx==0.2.15 fastapi==0.136.3 starlette==1.10.0 uvicorn==0.54.0 \
  httptools==0.9.0 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 \
  typing-inspection==0.4.5 openai==3.57.0 pyzmq==27.3.0 msgspec==0.22.0 orjson==3.13.0 \
  xgrammar==0.2.8 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5
install vllm -r "$requirements" loguru vllm==0.26.0
cd vllm/vllm
# What an H200 does not run, or these measurements do not need.
rm -rf vllm-rs vllm_flash_attn/_vllm_fa2_C.abi3.so third_party/fmha_sm100 _qutlass_C.abi3.so \
  third_party/deep_gemm/_C.cpython-31[0134]* ../pycountry/locales ../rignore ../fastar \
  ../mistral_common/data/*.json ../mistral_common/data/*.model*
python3 "$here/blank_kernels.py" _C_stable_libtorch.abi3.so _moe_C_stable_libtorch.abi3.so \
  _flashmla_C.abi3.so
cd "$work"
tar cf - -C runtime . | xz -T0 -6 > "$folder/part1/runtime.tar.xz"
tar cf - -C vllm . | xz -T0 -4 > vllm.tar.xz
half=26500000 # so that both folders have about the same size
head -c $half vllm.tar.xz > "$folder/part1/vllm.tar.xz.aa"
tail -c +$((half + 1)) vllm.tar.xz > "$folder/part2/vllm.tar.xz.ab"
du -sb "$folder"/part?
