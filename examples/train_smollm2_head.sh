#!/usr/bin/env bash
# Train an EAGLE-3 head for the default model and measure it: one command, about 10 minutes on one H200, no network.
# usage: examples/train_smollm2_head.sh [DIR]      A run that was cut goes on when the same command is given again.
set -euo pipefail
dir=${1:-heads/smollm2-135m-eagle3}
target=(--model smollm2-135m --gpu-memory-utilization 0.4 --max-num-seqs 256 --max-num-batched-tokens 16384)

# 7.45 M parameters: 14.98 MB in bfloat16 with the vocabulary maps. Prompts: templates of this package, and some more that
# the model makes up itself; greedy and sampled replies. Time limits, not counts, end both halves.
slipstream train "${target[@]}" --output "$dir" \
  --data builtin --num-prompts 12000 --invent-prompts 17000 \
  --max-reply-tokens 256 --max-sequence-tokens 512 --temperatures 0,0,0.7,1 --max-generate-minutes 2.2 \
  --draft-vocab-size 4096 --num-speculative-tokens 4 \
  --batch-tokens 16384 --learning-rate 1e-3 --epochs 40 --max-train-minutes 5 \
  --eval-every 500 --checkpoint-every 500 --patience 0

slipstream bench acceptance "$dir" --model smollm2-135m --num-speculative-tokens 4 --concurrency 32 --output "$dir/acceptance.json"
