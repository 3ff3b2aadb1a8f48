"""Checks the numbers of a model's config, before the server or the worker computes with them.

A wrong number must be named here: what it would break later (a logarithm, a division, the memory)
does not say which number was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .model_config import NotServed, short

# Largest values accepted in a config, each many times that of any known model. A larger one would
# exhaust the memory before the weights could contradict it.
_LAYERS, _HEADS, _HEAD, _WIDTH, _INNER = 1 << 10, 1 << 12, 1 << 13, 1 << 18, 1 << 22
_VOCABULARY, _EXPERTS, _TOKENS = 1 << 24, 1 << 14, 1 << 28
_MOST = {
    "num_hidden_layers": _LAYERS,
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "moe_intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_global_key_value_heads": _HEADS,
    "head_dim": _HEAD,
    "global_head_dim": _HEAD,
    "q_lora_rank": _WIDTH,
    "kv_lora_rank": _WIDTH,
    "o_lora_rank": _WIDTH,
    "o_groups": _HEADS,
    "qk_nope_head_dim": _HEAD,
    "qk_rope_head_dim": _HEAD,
    "v_head_dim": _HEAD,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": 1 << 10,
    "n_group": 1 << 10,
    "topk_group": 1 << 10,
    "first_k_dense_replace": _LAYERS,
    "index_n_heads": 1 << 10,
    "index_head_dim": _HEAD,
    "index_topk": 1 << 20,
    "hc_mult": 1 << 8,
    "hc_sinkhorn_iters": 1 << 10,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": 1 << 10,
    "top_k_experts": 1 << 10,
    "decoder_sparse_step": _LAYERS,
    "shared_expert_intermediate_size": _INNER,
    "max_position_embeddings": _TOKENS,
    "original_max_position_embeddings": _TOKENS,
    "sliding_window": _TOKENS,
    "num_kv_shared_layers": _LAYERS,
    "hidden_size_per_layer_input": _WIDTH,
    "vocab_size_per_layer_input": _VOCABULARY,
    "mtp_num_hidden_layers": _LAYERS,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": _HEAD,
    "linear_value_head_dim": _HEAD,
    "linear_conv_kernel_dim": 1 << 8,
}
_ABOVE_ZERO = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    "original_max_position_embeddings",
)
_REALS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "query_pre_attn_scalar", "hc_eps")
_MAYBE_ZERO = ("final_logit_softcapping", "attn_logit_softcapping", "swiglu_limit")
# Positive numbers of rotary embeddings. A config may state them for each type of layer.
_ROPE_REALS = (
    *("factor", "rope_theta", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"),
)
_ROPE_MAYBE_ZERO = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
_ROPE_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
_ROPE_LISTS = ("short_factor", "long_factor")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": _ROPE_LISTS,
}


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raise NotServed if a number of a text config is out of range; missing numbers are fine."""
    for name, most in _MOST.items():
        _check_count(name, config.get(name), 1 if name in _ABOVE_ZERO else 0, most)
    for name in _REALS:
        _check_real(name, config.get(name))
    for name in _MAYBE_ZERO:
        _check_real(name, config.get(name), may_be_zero=True)
    for rope in (config.get("rope_parameters"), config.get("rope_scaling")):
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise NotServed(f"its rope settings must be an object, not {short(rope)}.")
        for of_layers in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
            _check_rope(of_layers, config)
    heads = config.get("num_attention_heads")
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        key_heads = config.get(name) or 1
        if isinstance(heads, int) and heads % key_heads:
            raise NotServed(
                f"num_attention_heads ({heads}) must be a multiple of {name} ({key_heads})."
            )


def _check_rope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    for name in _ROPE_REALS:
        _check_real(name, rope.get(name))
    for name in _ROPE_MAYBE_ZERO:
        _check_real(name, rope.get(name), may_be_zero=True)
    for name in _ROPE_LENGTHS:
        _check_count(name, rope.get(name), 1, _TOKENS)
    for name in _ROPE_LISTS:
        values = rope.get(name)
        if values is not None and not isinstance(values, list):
            raise NotServed(f"{name} must be a list of numbers, not {short(values)}.")
        for value in values or ():
            _check_real(name, value)
    partial = rope.get("partial_rotary_factor")
    if partial is not None and partial > 1:
        raise NotServed(f"partial_rotary_factor must be at most 1, not {short(partial)}.")
    kind = rope.get("rope_type", rope.get("type"))
    missing = [name for name in _ROPE_NEEDS.get(str(kind), ()) if rope.get(name) is None]
    if missing:
        raise NotServed(f"its rope scaling {short(kind)} needs {missing[0]}.")
    theta = rope.get("rope_theta") or config.get("rope_theta")
    if kind == "yarn" and theta is not None and theta <= 1:
        raise NotServed(f"rope_theta must be above 1 for YaRN, but its config says {short(theta)}.")
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if kind == "llama3" and low >= high:  # type: ignore[operator]
        raise NotServed(
            f"high_freq_factor ({short(high)}) must be above low_freq_factor ({short(low)})."
        )


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if value is not None and not (type(value) is int and least <= value <= most):
        raise NotServed(
            f"{name} must be an integer from {least} to {most}, but its config says {short(value)}."
        )


def _check_real(name: str, value: object, may_be_zero: bool = False) -> None:
    if value is None or (may_be_zero and type(value) in (int, float) and value == 0):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < 1e30):  # type: ignore[operator]
        least = "of at least" if may_be_zero else "above"
        raise NotServed(f"{name} must be a number {least} 0, but its config says {short(value)}.")
