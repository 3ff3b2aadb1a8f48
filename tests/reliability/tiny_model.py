"""A tiny random model with the default model's tokenizer, for servers whose texts no test reads.

A step of it costs a few milliseconds, where one of the default model costs tens. Its last token is
likely to repeat, so the n-gram drafter makes drafts, and many of them are accepted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..speculators.tiny_engine import stated

NAME = "smollm2-135m"  # of its tokenizer, and by which requests ask for it
VOCAB, HIDDEN = 49152, 32
FLAGS = ("--tokenizer", NAME, "--served-model-name", NAME, "--dtype", "float32", "--device", "cpu")
# Blocks of as many tokens as 32 MiB hold of the default model: see `soak.FLAGS`.
SMALL_CACHE = ("--max-model-len", "512", "--num-gpu-blocks-override", "46")


def save(folder: Path) -> Path:
    """Save the model's weights and config; returns the folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.1, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.4)
    model.save_pretrained(folder)
    return stated(folder)
