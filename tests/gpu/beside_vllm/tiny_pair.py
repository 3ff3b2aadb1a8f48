"""Writes a small random model, one near it as its draft model, and prompts: tiny_pair.py FOLDER

FOLDER/target and FOLDER/draft have a tokenizer of one word a token. The weights are large, so that
logits lie far apart and rounding decides seldom; the draft model's differ from the target's by a
few per cent, so that it is right often and not always. FOLDER/prompts.jsonl is for `--data`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, NOISE = 4096, 0.04
sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
from shapes import write_tokenizer  # noqa: E402


def main(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=8192,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    shapes = {key: weight.shape for key, weight in LlamaForCausalLM(config).state_dict().items()}
    for name in ("target", "draft"):
        torch.manual_seed(0)  # both draw the same weights, and the same noise, which one uses
        state = {}
        for key, shape in shapes.items():
            scale = 0.2 if key.startswith("lm_head") else 1.0 if "embed" in key else 0.06
            drawn, noise = torch.randn(shape) * scale, torch.randn(shape) * scale * NOISE
            state[key] = drawn + noise if name == "draft" else drawn
            if key.endswith("norm.weight"):
                state[key] = torch.ones(shape)
        (folder / name).mkdir(parents=True, exist_ok=True)
        tensors = {key: weight.to(torch.bfloat16).contiguous() for key, weight in state.items()}
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        settings = config.to_dict() | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
        settings["architectures"] = ["LlamaForCausalLM"]
        (folder / name / "config.json").write_text(json.dumps(settings))
        write_tokenizer(folder / name, VOCAB)
    draw = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as lines:
        for _ in range(32):
            words = " ".join(f"w{draw.randrange(10, VOCAB)}" for _ in range(draw.randint(8, 40)))
            lines.write(json.dumps({"messages": [{"role": "user", "content": words}]}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
