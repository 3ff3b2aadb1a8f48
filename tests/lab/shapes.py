"""Writes model folders without weights, for `--load-format dummy`.

`python tests/lab/shapes.py FOLDER` writes FOLDER/llama-8b (the shape of Llama 8B),
FOLDER/llama-8b-16k (the same for contexts of up to 16,384 tokens) and FOLDER/eagle3-8b (an EAGLE-3
head for both).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
EAGLE3_8B = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
}  # fmt: skip


def write(folder: Path) -> None:
    """Write all model folders; each has only a config.json."""
    long = LLAMA_8B | {"max_position_embeddings": 16384}
    for name, config in (("llama-8b", LLAMA_8B), ("llama-8b-16k", long), ("eagle3-8b", EAGLE3_8B)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
