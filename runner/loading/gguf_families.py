"""What differs in GGUF files of some families.

Gemma 3: names, settings that the header implies, norm weights. Models with experts: numbers of the
header, and one tensor [E, R, C] for each of gate, up and down of a layer, which is read as a matrix
for each expert, in the format of the file. gpt-oss: sinks, and biases of experts. DeepSeek V2, V3:
names, and the two halves of a projection that checkpoints have as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...configs.model.model_config import NotServed, short

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
WITH_EXPERTS = ("qwen2moe", "qwen3moe", "gpt-oss", "deepseek2")
GPT_OSS_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
DEEPSEEK_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",  # with attn_v_b, see `joined_halves`
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# tensors of a block -> their whole names in transformers
WHOLE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
KEY_HALF, VALUE_HALF = "attn_k_b", "attn_v_b"
# name in a config.json -> key of the header
EXPERT_NUMBERS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_SIGMOID = 2  # the gating function of DeepSeek V3
_SHARED_SIZE = "expert_shared_feed_forward_length"


def whole(setting: Callable[[str, Any], Any], key: str, default: int) -> int:
    """A whole number of the header. Raises NotServed for what is none, or no size."""
    value = setting(key, default)
    if type(value) is not int or not 0 <= value < 2**31:
        raise NotServed(f"{key} must be a whole number, but its header says {short(value)}.")
    return value


def gemma3_settings(config: dict[str, Any], setting: Callable[[str, Any], Any]) -> dict[str, Any]:
    """`config` with Gemma 3's own keys; `setting` reads a key of the header, or gives a default."""
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    is_27b = count == _LAYERS_OF_27B
    scalar = config["hidden_size"] // heads if is_27b else config["head_dim"]
    sliding = {"rope_type": "default", "rope_theta": setting("rope.freq_base_swa", _SLIDING_THETA)}
    pattern = ["sliding_attention"] * (_PATTERN - 1) + ["full_attention"]
    return config | {
        "layer_types": (pattern * count)[:count],
        "sliding_window": whole(setting, "attention.sliding_window", 512),
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
    found = {name: whole(setting, key, 0) for name, key in EXPERT_NUMBERS.items()}
    return config | {
        **found,
        "norm_topk_prob": architecture == "qwen3moe",  # as llama.cpp assumes
        "shared_expert_intermediate_size": whole(setting, _SHARED_SIZE, 0),
        "attention_bias": False,
        "qkv_bias": config["attention_bias"],
    }


def block_names(architecture: str) -> dict[str, str]:
    """The names in a block that differ from those of most architectures."""
    if architecture == "gemma3":
        return GEMMA3_NAMES
    if architecture == "gpt-oss":
        return GPT_OSS_NAMES
    if architecture == "deepseek2":
        return DEEPSEEK_NAMES
    return EXPERT_NAMES if architecture in WITH_EXPERTS else {}


def gpt_oss_settings(config: dict[str, Any], setting: Callable[[str, Any], Any]) -> dict[str, Any]:
    """`config` with gpt-oss's own keys; `setting` as above."""
    pattern = ["sliding_attention", "full_attention"]
    return config | {
        "num_local_experts": whole(setting, "expert_count", 0),
        "num_experts_per_tok": whole(setting, "expert_used_count", 0),
        "intermediate_size": whole(setting, "expert_feed_forward_length", 0),
        "layer_types": (pattern * config["num_hidden_layers"])[: config["num_hidden_layers"]],
        "sliding_window": whole(setting, "attention.sliding_window", 128),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


def deepseek_settings(config: dict[str, Any], setting: Callable[[str, Any], Any]) -> dict[str, Any]:
    """`config` with the keys of DeepSeek V2 and V3; `setting` as above.

    Files that have attn_k_b state the sizes of cached rows as those of heads, and the sizes of
    heads apart.
    """
    key = whole(setting, "attention.key_length_mla", config["head_dim"])
    value = whole(setting, "attention.value_length_mla", setting("attention.value_length", key))
    rope = whole(setting, "rope.dimension_count", 64)
    groups = whole(setting, "expert_group_count", 1)
    is_v3 = whole(setting, "expert_gating_func", 1) == _SIGMOID
    q_rank = setting("attention.q_lora_rank", None)
    if not 0 < rope < key:
        raise ValueError(f"heads of {key} numbers cannot have {rope} that are rotated")
    turn = config["rope_parameters"]
    if (multiplier := setting("rope.scaling.yarn_log_multiplier", None)) is not None:
        if type(multiplier) is not float or not 0 <= multiplier < 1e30:
            raise NotServed(
                "rope.scaling.yarn_log_multiplier must be a number of at least 0, but its header "
                f"says {short(multiplier)}."
            )
        turn = turn | dict.fromkeys(("mscale", "mscale_all_dim"), 10.0 * multiplier)
    return config | {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope,
        "q_lora_rank": q_rank,
        "kv_lora_rank": whole(setting, "attention.kv_lora_rank", 512),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "n_routed_experts": whole(setting, "expert_count", 0),
        "n_shared_experts": whole(setting, "expert_shared_count", 0),
        "num_experts_per_tok": whole(setting, "expert_used_count", 0),
        "moe_intermediate_size": whole(setting, "expert_feed_forward_length", 0),
        "first_k_dense_replace": whole(setting, "leading_dense_block_count", 0),
        "routed_scaling_factor": setting("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(setting("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": whole(setting, "expert_group_used_count", groups),
        "topk_method": "noaux_tc" if is_v3 else "greedy" if groups == 1 else "group_limited_greedy",
        "rope_parameters": turn,
        "attention_bias": False,
    }


OWN_SETTINGS = {"gpt-oss": gpt_oss_settings, "deepseek2": deepseek_settings}


def joined_halves(key: Tensor, value: Tensor) -> Tensor:
    """The projection [heads * (nope + v), latent] of which a file has two halves.

    key: [heads, latent, nope]; value: [heads, v, latent].
    """
    return torch.cat((key.transpose(1, 2), value), 1).flatten(0, 1)


def expert_names(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """The names, as in transformers' checkpoints, of the matrices in a stack, in order; none for
    other tensors."""
    parts = name.removesuffix(".weight").split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in _STACKS:
        return
    if len(shape) != 3 or 0 in shape or shape[0] > _MOST_EXPERTS:
        return
    for expert in range(shape[0]):
        yield f"model.layers.{parts[1]}.mlp.experts.{expert}.{_STACKS[parts[2]]}.weight"
