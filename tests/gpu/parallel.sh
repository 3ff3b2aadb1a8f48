#!/usr/bin/env bash
# Checks and measures two GPUs: parallel.sh OUT [PYTHON] [SECONDS] [PART]
# PART is "ranks" (tensor parallelism, the default), "engines" (engines that share experts), "groups"
# (their whole steps, nodes and small sums), "groups4" (two engines of two GPUs each), or "exchange"
# (`--all2all-backend all_to_all`, and gpt-oss by experts).
# Every step has a log and a limit of its own. The steps that say most come first, and none begins
# or goes on after SECONDS (390 by default). With STEPS="replays killed" only these steps run.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-.venv/bin/python}
total=${3:-390}
part=${4:-ranks}
cd "$(dirname "$0")/../.." || exit 1
# NVLink multicast can put the GPUs of a shared host out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD/.src${PYTHONPATH:+:$PYTHONPATH}"
: > "$out/summary.txt"

step() { # name, limit in seconds, command...
  local name=$1 limit=$2 left=$((total - SECONDS))
  shift 2
  [[ -z "${STEPS:-}" || " $STEPS " == *" $name "* ]] || return 0
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 10 ]; then
    echo "$name: left out, no time" | tee -a "$out/summary.txt"
    return
  fi
  local line status
  line=$("$python" tests/gpu/within.py "$limit" "$out/$name.log" "$@")
  status=$?
  echo "$name: $line" | tee -a "$out/summary.txt"
  return $status
}

run_tests() { # name, limit, words of the tests' names
  local file=test_parallel_cuda.py
  [ "$part" != ranks ] && file=test_engine_group_cuda.py
  [ "$part" = exchange ] && file=test_exchange_cuda.py
  step "$1" "$2" "$python" -X faulthandler -m pytest -x -s -rA -m gpu -p no:cacheprovider \
    -p no:benchmark --durations=8 "tests/gpu/$file" -k "$3"
}

bench() { # name, limit, drafts, more flags...
  local name=$1 limit=$2 drafts=$3
  shift 3
  step "$name" "$limit" "$python" -m slipstream.server.commands bench offline "$models/llama-8b" \
    --load-format dummy --batch-sizes 1,32,256 --input-len 128 --output-len 96 --num-iters 1 \
    --max-num-seqs 256 --max-num-batched-tokens 8192 --max-model-len 1024 -sc "$drafts" $nccl "$@"
}

models=$(mktemp -d)
"$python" tests/lab/shapes.py "$models"
rates='"synthetic_acceptance_rates": [0.8, 0.6, 0.42]'
head="{\"method\": \"eagle3\", \"model\": \"$models/eagle3-8b\", \"num_speculative_tokens\": 3, \"load_format\": \"dummy\", $rates}"

if [ "$part" = engines ]; then
  v3="$models/deepseek-v3-7"
  run_tests text 200 "two_engines_write_the_text_of_one"
  step v3-mtp 200 "$python" tests/lab/engine_group.py "$v3" --steps 1000 --drafts 2
  run_tests killed 90 "killed"
  step v3-mtp-eager 120 "$python" tests/lab/engine_group.py "$v3" --steps 100 --enforce-eager
  step v3-off 120 "$python" tests/lab/engine_group.py "$v3" --steps 100 --method off
  step v3-off-alone 120 "$python" tests/lab/engine_group.py "$v3" -dp 1 --no-expert-parallel \
    --steps 100 --method off
  rm -rf "$models"
  tail -n 1 "$out"/v3-*.log
  exit
fi

if [ "$part" = groups ]; then
  v3="$models/deepseek-v3-7"
  run_tests whole 200 "two_engines_write_the_text_of_one and (graphs or forward or drafts)"
  step sums-of-own-group 45 "$python" tests/lab/measure_allreduce.py --groups 1 --check
  run_tests nodes 90 "two_nodes"
  step v3-mtp 150 "$python" tests/lab/engine_group.py "$v3" --steps 300
  step v3-mtp-forward 150 "$python" tests/lab/engine_group.py "$v3" --steps 300 --no-whole-step
  step v3-off 120 "$python" tests/lab/engine_group.py "$v3" --steps 100 --method off
  step v3-off-forward 120 "$python" tests/lab/engine_group.py "$v3" --steps 100 --method off \
    --no-whole-step
  rm -rf "$models"
  tail -n 1 "$out"/v3-*.log
  exit
fi

if [ "$part" = exchange ]; then
  v3="$models/deepseek-v3-7"
  step rows 120 "$python" tests/lab/measure_exchange.py
  run_tests text 180 "all_to_all"
  run_tests gpt-oss 120 "gpt_oss"
  for backend in all_to_all allgather_reducescatter; do
    step "v3-$backend" 200 "$python" tests/lab/engine_group.py "$v3" --steps 300 --drafts 2 \
      --all2all-backend "$backend"
    step "v3-eager-$backend" 120 "$python" tests/lab/engine_group.py "$v3" --steps 100 \
      --method off --enforce-eager --all2all-backend "$backend"
  done
  rm -rf "$models"
  cat "$out/rows.log"
  tail -n 1 "$out"/v3-*.log
  exit
fi

if [ "$part" = groups4 ]; then
  v3="$models/deepseek-v3-7"
  step sums-of-own-groups 60 "$python" tests/lab/measure_allreduce.py --size 4 --groups 2
  run_tests text 150 "two_engines_of_two_gpus"
  step v3-mtp 200 "$python" tests/lab/engine_group.py "$v3" -tp 2 --steps 300
  step v3-mtp-nccl 200 "$python" tests/lab/engine_group.py "$v3" -tp 2 --steps 300 --nccl
  rm -rf "$models"
  tail -n 1 "$out"/v3-*.log "$out/sums-of-own-groups.log"
  exit
fi

nccl= # flags of all servers
# With an empty cache of kernels, each start of an engine takes about 20 s.
if ! step sums 45 "$python" tests/lab/measure_allreduce.py; then
  # The rest is worth running all the same.
  nccl=--disable-custom-all-reduce
  export SLIPSTREAM_TEST_NCCL=1
fi
run_tests text 90 "write_the_text_of_one and graphs"
run_tests replays 60 "replays_equal"
run_tests killed 100 "killed_rank"
bench off-tp2 80 off -tp 2
bench off-tp2-nccl 70 off -tp 2 --disable-custom-all-reduce
bench off-tp1 70 off
run_tests eager 90 "write_the_text_of_one and eager"
run_tests quantised 140 "quantised"
run_tests drafts 90 "drafts_change_no_text"
bench eagle3-tp2 80 "$head" -tp 2
bench eagle3-tp1 80 "$head"
step draft-parts 60 "$python" tests/lab/measure_divided.py
bench eagle3-divided 80 "${head%\}}, \"draft_tensor_parallel_size\": 2}" -tp 2
bench eagle3-whole 80 "${head%\}}, \"draft_tensor_parallel_size\": 1}" -tp 2
run_tests divided 200 "draft_alike"
run_tests experts 70 "experts"
rm -rf "$models"
grep -H "tok/s\|tokens/s\|^ *[0-9]" "$out"/off-tp*.log "$out"/eagle3-*.log "$out/sums.log" "$out/draft-parts.log"
