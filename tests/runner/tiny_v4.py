"""Tiny random DeepSeek V4 checkpoints, made by transformers, with every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

RAW, INDEXED, PLAIN = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
VOCAB, WINDOW, RATIOS = 61, 10, {INDEXED: 4, PLAIN: 8}
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=4,
    num_attention_heads=4, head_dim=32, qk_rope_head_dim=8, q_lora_rank=24, n_routed_experts=8,
    num_experts_per_tok=3, max_position_embeddings=256, sliding_window=WINDOW, o_groups=2,
    o_lora_rank=12, index_n_heads=16, index_head_dim=16, index_topk=3, hc_mult=4,
    layer_types=[RAW, INDEXED, PLAIN, INDEXED],
    mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
    compress_rates=RATIOS, swiglu_limit=1.5, eos_token_id=None, bos_token_id=None,
    rope_parameters={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1,
    },
)  # fmt: skip


def make_v4(folder: Path, seed: int = 1, spread: float = 0.15, **changes: Any) -> Any:
    """Save a checkpoint in which every weight is random; returns the model of transformers."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV4Config(**{**SHAPE, **changes})
    config._attn_implementation = "eager"
    oracle = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in (*oracle.named_parameters(), *oracle.named_buffers()):
            if "tid2eid" in name:
                picks = [torch.randperm(config.n_routed_experts) for _ in range(len(tensor))]
                tensor.copy_(torch.stack(picks)[:, : tensor.shape[1]])
            elif "norm" in name:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            elif "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * spread)
    oracle.save_pretrained(folder)
    return oracle
