"""What differs in GGUF files of Gemma 3: names, settings that the header implies, norm weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

BLOCK_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PATTERN = 6  # every sixth layer attends to the whole context
_SLIDING_THETA = 10000.0
_LAYERS_OF_27B = 62  # the only size whose scale is not that of its head dimension


def settings(config: dict[str, Any], setting: Callable[[str, Any], Any]) -> dict[str, Any]:
    """`config` with Gemma 3's own keys; `setting` reads a key of the header, or gives a default."""
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    is_27b = count == _LAYERS_OF_27B
    scalar = config["hidden_size"] // heads if is_27b else config["head_dim"]
    sliding = {"rope_type": "default", "rope_theta": setting("rope.freq_base_swa", _SLIDING_THETA)}
    pattern = ["sliding_attention"] * (_PATTERN - 1) + ["full_attention"]
    return config | {
        "layer_types": (pattern * count)[:count],
        "sliding_window": int(setting("attention.sliding_window", 512)),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": sliding,
        },
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": setting("final_logit_softcapping", None),
        "attn_logit_softcapping": setting("attn_logit_softcapping", None),
    }


def stored_norm(weight: Tensor) -> Tensor:
    """A norm's weight as transformers stores it: llama.cpp's converter adds 1."""
    return weight - 1.0
