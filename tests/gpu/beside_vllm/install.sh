#!/usr/bin/env bash
# Unpacks what parts.sh made, on the machine with the GPUs: install.sh SITE ARCHIVE ...
# Archives whose names end in .aa, .ab, … are parts of one. Afterwards: export PYTHONPATH=SITE
set -euo pipefail
site=${1:?usage: install.sh SITE ARCHIVE ...}
shift
mkdir -p "$site"
cat "$@" | tar xJf - -C "$site"
if [ -d "$site/vllm" ]; then
  # An optional import of a tokenizer class that some versions of transformers cannot provide.
  sed -i 's/^ *from transformers import MistralCommonBackend/class MistralCommonBackend: pass/' \
    "$site/vllm/v1/structured_output/backend_guidance.py"
  mkdir -p "$site/pydantic_extra_types"
fi
