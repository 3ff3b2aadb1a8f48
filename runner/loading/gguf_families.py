"""What differs in GGUF files of some families.

Gemma 3: names, settings that the header implies, norm weights. Models with experts: numbers of the
header, and one tensor [E, R, C] for each of gate, up and down of a layer, which is read as a matrix
for each expert, in the file's own format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

GEMMA3_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PATTERN = 6  # every sixth layer attends to the whole context
_SLIDING_THETA = 10000.0
_LAYERS_OF_27B = 62  # the only size whose scale is not that of its head dimension
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SHARED_GATE = "ffn_gate_inp_shexp"  # a matrix of one row, stored without the dimension of rows
_STACKS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_MOST_EXPERTS = 1 << 14  # experts of a layer, as in a config
WITH_EXPERTS = ("qwen2moe", "qwen3moe")
# name in a config.json -> key of the header
EXPERT_NUMBERS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_SHARED_SIZE = "expert_shared_feed_forward_length"


def gemma3_settings(config: dict[str, Any], setting: Callable[[str, Any], Any]) -> dict[str, Any]:
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


def expert_settings(
    architecture: str, config: dict[str, Any], setting: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """`config` with the keys of experts. `setting` reads a key of the header or gives a default."""
    found = {name: int(setting(key, 0)) for name, key in EXPERT_NUMBERS.items()}
    return config | {
        **found,
        "norm_topk_prob": architecture == "qwen3moe",  # as llama.cpp assumes
        "shared_expert_intermediate_size": int(setting(_SHARED_SIZE, 0)),
        "attention_bias": False,
        "qkv_bias": config["attention_bias"],
    }


def expert_names(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """The names, as in transformers' checkpoints, of the matrices in a stack, in order; none for
    other tensors."""
    parts = name.removesuffix(".weight").split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in _STACKS:
        return
    if len(shape) != 3 or shape[0] > _MOST_EXPERTS:
        return
    for expert in range(shape[0]):
        yield f"model.layers.{parts[1]}.mlp.experts.{expert}.{_STACKS[parts[2]]}.weight"
