"""Reads the config.json of a plain Llama, Mistral or Qwen without transformers, because importing
that takes longer than starting CUDA.

It applies only if the file states every value that transformers would fill in: it has no defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
_LLAMA3 = {
    "rope_type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings",
}  # fmt: skip


def plain_config(raw: Mapping[str, Any], needs_eos: bool = True) -> Any | None:
    """A config with the values that our models read; None if transformers must parse `raw`."""
    if not _is_plain(raw) or (needs_eos and "eos_token_id" not in raw):
        return None
    window = _sliding_window(raw)
    if window is None:
        return None
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return SimpleNamespace(**{**raw, "dtype": dtype, "sliding_window": window or None})


def _is_plain(raw: Mapping[str, Any]) -> bool:
    counts = [raw.get(name) for name in _COUNTS]
    if not all(type(count) is int and count > 0 for count in counts):
        return False
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim")
    biases = (raw.get("attention_bias", False), raw.get("mlp_bias", False))
    return (
        raw["hidden_size"] % heads == 0
        and heads % kv_heads == 0
        and (head_dim is None or (type(head_dim) is int and head_dim > 0))
        and type(raw.get("rms_norm_eps")) is float
        and type(raw.get("tie_word_embeddings")) is bool
        and raw.get("hidden_act", "silu") == "silu"
        and all(type(bias) is bool for bias in biases)
        and _has_plain_tokens(raw)
        and _has_full_layers(raw)
        and raw.get("model_type") in ("llama", "mistral", "qwen2", "qwen3")
        and (raw["model_type"] != "qwen3" or head_dim is not None)
        and _has_plain_rope(raw)
    )


def _has_plain_tokens(raw: Mapping[str, Any]) -> bool:
    first, pad, last = (raw.get(f"{name}_token_id") for name in ("bos", "pad", "eos"))
    several = last if isinstance(last, list) else [last]
    return all(type(token) in (int, type(None)) for token in (first, pad, *several))


def _has_full_layers(raw: Mapping[str, Any]) -> bool:
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list):
        return kinds is None
    return len(kinds) == raw["num_hidden_layers"] and set(map(str, kinds)) == {"full_attention"}


def _has_plain_rope(raw: Mapping[str, Any]) -> bool:
    """True for default rotary embeddings and for Llama 3's scaling.

    Transformers 5 writes either one, with its theta, into `rope_parameters`.
    """
    rope, scaling, theta = (raw.get(f"rope_{n}") for n in ("parameters", "scaling", "theta"))
    if raw.get("partial_rotary_factor"):
        return False
    if rope is not None:
        if scaling is not None or theta is not None or not isinstance(rope, dict):
            return False  # transformers decides which of them counts
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        theta = rope.get("rope_theta")
    if type(theta) not in (int, float):
        return False
    return scaling in (None, {"rope_type": "default"}) or (
        isinstance(scaling, dict) and set(scaling) == _LLAMA3 and scaling["rope_type"] == "llama3"
    )


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    """The sliding window of all layers; 0 = none, None = not stated, or not the same for all."""
    kind = raw["model_type"]
    if kind == "llama":
        return 0
    if kind == "mistral":
        window = raw.get("sliding_window", "unstated")
        return 0 if window is None else window if type(window) is int else None
    return 0 if raw.get("use_sliding_window") is False else None
