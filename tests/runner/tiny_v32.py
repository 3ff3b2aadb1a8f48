"""Tiny random DeepSeek V3.2 checkpoints, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, TOP_K = 61, 6
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, moe_intermediate_size=24,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
    n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1, q_lora_rank=40,
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=20, n_group=4,
    topk_group=2, routed_scaling_factor=1.7, max_position_embeddings=128, index_topk=TOP_K,
    index_head_dim=32, index_n_heads=16, eos_token_id=None, bos_token_id=None,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
)  # fmt: skip


def make_v32(folder: Path, seed: int = 1, **changes: Any) -> Any:
    """Save a checkpoint in which every weight is random; returns the model of transformers."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV32Config(**{**SHAPE, **changes})
    config._attn_implementation = "eager"
    oracle = transformers.DeepseekV32ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in (*oracle.named_parameters(), *oracle.named_buffers()):
            if "norm" in name and "bias" not in name:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            elif "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * 0.2)
    oracle.save_pretrained(folder)
    return oracle
