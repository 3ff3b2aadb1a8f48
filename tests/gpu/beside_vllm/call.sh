#!/usr/bin/env bash
# One call of the measurement beside vLLM, on a machine with two GPUs and 32 cores:
#   call.sh NUMBER OUT PARTS [SECONDS]
# NUMBER is 1 (ours), 2 (vLLM), 3 (both on two GPUs), 4 (what calls 1 and 2 leave out), or 0, which
# only installs what is carried. PARTS is the folder of parts.sh; call 1 needs its part1, call 2 its
# part2 as well. Calls follow each other on one machine. OUT gets lines of figures at once, then a
# table and the logs; SECONDS is the limit. With SIDES=vllm or SIDES=ours, one side is left out.
set -u
call=${1:?usage: call.sh NUMBER OUT PARTS [SECONDS]}
out=$(mkdir -p "$2" && cd "$2" && pwd)
parts=$(cd "$3" && pwd)
total=${4:-570}
cd "$(dirname "$0")/../../.." || exit 1
here=tests/gpu/beside_vllm
site=${SITE:-/tmp/site} kept=${KEPT:-/tmp/beside_vllm}
python=${PYTHON:-python3}
mkdir -p "$kept/parts" "$kept/lines" "$kept/logs"
export PYTHONPATH="$PWD/.src:$site"
cp -n "$parts"/part*/vllm.tar.xz.a? "$kept/parts/" 2> /dev/null
[ -d "$site/fastapi" ] || bash $here/install.sh "$site" "$parts/part1/runtime.tar.xz"
if [ "$call" -gt 1 ] && [ ! -d "$site/vllm" ]; then
  for part in aa ab; do
    [ -e "$kept/parts/vllm.tar.xz.$part" ] && continue
    echo "this machine has no vllm.tar.xz.$part; carry it, and run call 0 first" >&2
    exit 2
  done
  bash $here/install.sh "$site" "$kept"/parts/vllm.tar.xz.a?
  "$python" -m compileall -q -j 0 "$site/vllm" > /dev/null 2>&1
fi
models=$kept/models
[ -d "$models" ] || "$python" tests/lab/shapes.py "$models"
echo "installed after $SECONDS s"

# The threads of one physical core belong to one lane.
read -r cores0 cores1 < <(PYTHONPATH="$here:$PYTHONPATH" "$python" -c '
from started import core_sets, named
print(*map(named, core_sets(2)))')
echo "cores: $cores0 and $cores1"

lane() { # side, GPUs, cores, seconds, items...
  local side=$1 gpus=$2 cores=$3 seconds=$4
  shift 4
  [[ "${SIDES:-ours vllm}" == *"$side"* ]] || return 0
  "$python" $here/lane.py "$side" "$out/$call-$side-gpu${gpus%%,*}.jsonl" --gpus "$gpus" \
    --cores "$cores" --seconds "$seconds" --models "$models" --logs "$kept/logs" \
    --copy "$kept/lines/$call-$side-gpu${gpus%%,*}.jsonl" "$@"
}

left=$((total - SECONDS - 15))
case $call in
  0) exit ;;
  1)
    lane ours 0 "$cores0" $left served &
    lane ours 1 "$cores1" $left qwen3-30b-a3b / gpt-oss-20b / qwen3.5-27b / qwen3-30b-a3b+eagle3 / \
      gpt-oss-20b+eagle3 / qwen3.5-27b+mtp / llama-8b-fp8 / llama-8b-int4 / \
      llama-8b-fp8+eagle3 / qwen3-30b-a3b-fp8 / qwen3-30b-a3b-fp8+eagle3 &
    ;;
  2)
    lane vllm 0 "$cores0" $left served / llama-8b-fp8 llama-8b-int4 llama-8b-fp8+eagle3 &
    lane vllm 1 "$cores1" $left qwen3-30b-a3b gpt-oss-20b / qwen3.5-27b+mtp / \
      qwen3.5-27b qwen3-30b-a3b-fp8 / qwen3-30b-a3b+eagle3 gpt-oss-20b+eagle3 &
    ;;
  3)
    {
      lane ours 0,1 "$cores0,$cores1" $((left * 2 / 5)) llama-8b-tp2 / llama-8b-tp2+eagle3 / \
        llama-70b-tp2 / llama-70b-tp2+eagle3
      lane vllm 0,1 "$cores0,$cores1" $((total - SECONDS - 15)) llama-8b-tp2 llama-8b-tp2+eagle3 \
        llama-70b-tp2 / llama-70b-tp2+eagle3
    } &
    ;;
  4)
    lane vllm 0 "$cores0" $left verify / llama-8b-fp8 llama-8b-int4 llama-8b-fp8+eagle3 &
    lane vllm 1 "$cores1" $left qwen3.5-27b+mtp / qwen3-30b-a3b-fp8+eagle3 gpt-oss-20b+eagle3 &
    ;;
  *) echo "unknown call: $call" >&2; exit 2 ;;
esac
wait
"$python" $here/table.py "$kept"/lines/*.jsonl | tee "$out/table.txt"
# The logs of earlier calls are kept, for one that was cut.
tar czf "$out/logs.tar.gz" --exclude=tiny --exclude='*.jsonl' -C "$kept" logs
