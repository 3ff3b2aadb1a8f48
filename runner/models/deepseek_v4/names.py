"""The tensor names of DeepSeek V4 checkpoints: DeepSeek's own, and those of transformers."""

from __future__ import annotations

import re

# transformers' name -> DeepSeek's, in order; all that match are applied.
_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.sinks$", ".attn_sink"),
        # before the compressors' own parts
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),  # transformers' mistake when it saves
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.(shared_experts|experts\.\d+)\.gate_proj\.", r".\1.w1."),
        (r"\.(shared_experts|experts\.\d+)\.up_proj\.", r".\1.w3."),
        (r"\.(shared_experts|experts\.\d+)\.down_proj\.", r".\1.w2."),
    )
)
_MODULE = re.compile(r"^(model\.)?mtp\.")


def plain_name(name: str) -> str:
    """DeepSeek's name of a stored tensor."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def is_of_module(name: str) -> bool:
    """Whether the tensor belongs to a module for multi-token prediction."""
    return _MODULE.match(name) is not None
