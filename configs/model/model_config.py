"""Decides from config.json alone whether a model is supported: architecture, sizes.

The server checks before it downloads weights or starts a worker; the worker checks again.
`runner/models/registry.py` maps each architecture to the class that implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# model_type -> architecture, for configs without `architectures`
ARCHITECTURE_OF_TYPE: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
}
ARCHITECTURES = tuple(ARCHITECTURE_OF_TYPE.values())
# GGUF architecture -> model_type
GGUF_TYPES = {
    **{name: name for name in ("llama", "mistral", "qwen2", "qwen3")},
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v3",  # or deepseek_v2, which the header says otherwise
}

# Ignored in downloads and folders: a second copy of the weights, in Mistral's own format.
OTHER_WEIGHTS = "consolidated*.safetensors"

# name in a config.json -> key of a GGUF header, after the architecture's name and a dot
GGUF_NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


class NotServed(Exception):
    """The model is not supported, or its config is invalid; the text is one sentence."""


@contextmanager
def refused_as(kind: Callable[[str], Exception], source: object) -> Iterator[None]:
    """A context that turns NotServed into an error of `kind` that names the source."""
    try:
        yield
    except NotServed as error:
        raise kind(f"{source} cannot be served: {error}") from error


def served_architecture(config: Mapping[str, Any]) -> str:
    """The first supported architecture that a config names, or its model_type implies.

    Raises NotServed if there is none."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise NotServed(f"architectures must be a list of names, not {short(named)}.")
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise NotServed(f"model_type must be a name, not {short(kind)}.")
    if kind is not None and kind not in ARCHITECTURE_OF_TYPE and not set(named) - {*ARCHITECTURES}:
        named = named and [f"{named[0]} of model_type {short(kind)}"]
    if not named and not isinstance(kind, str):
        raise NotServed("its config names neither architectures nor a model_type.")
    for name in named or [ARCHITECTURE_OF_TYPE.get(str(kind), str(kind))]:
        if name in ARCHITECTURES:
            return str(name)
    what = short(", ".join(named or [str(kind)]))[1:-1]
    raise NotServed(
        f"architecture {what} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}."
    )


def is_block_size(value: object) -> bool:
    """Whether the value is a list of two positive integers: the rows and columns of a block."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and 0 < size < 2**31 for size in value)
    )


def is_file_name(value: object) -> bool:
    """Whether the value is a plain file name, so that it cannot point outside the model's folder.

    The file names in a checkpoint's index must be plain."""
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & set("/\\\0")


def check_gguf_architecture(name: object) -> str:
    """The model_type of a GGUF architecture; raises NotServed if it is not supported."""
    if not isinstance(name, str) or name not in GGUF_TYPES:
        raise NotServed(
            f"GGUF architecture {short(name)} is not supported; supported: "
            f"{', '.join(sorted(GGUF_TYPES))}."
        )
    return GGUF_TYPES[name]


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config, with the entries of its `text_config`, if it has one, merged over it.

    Multimodal models state the sizes of their language model there. Raises NotServed if
    `text_config` is not an object."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise NotServed(f"its text_config must be an object, not {short(text)}.")
    return {**config, **(text or {})}


def check_weights(config: Mapping[str, Any], num_tensors: int, num_bytes: int) -> None:
    """Raise NotServed if a text config describes a far larger model than the weights can hold.

    The weights have `num_tensors` tensors and `num_bytes` bytes in all."""
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > num_tensors:
        raise NotServed(
            f"its config says {layers} layers, but its files hold {num_tensors} tensors."
        )
    vocab, hidden = config.get("vocab_size"), config.get("hidden_size")
    if isinstance(vocab, int) and isinstance(hidden, int) and vocab * hidden > 8 * num_bytes:
        raise NotServed(
            f"its config says {vocab} tokens of size {hidden}, but its weights have "
            f"{num_bytes} bytes in all."
        )


def eos_token_ids(value: object, where: str) -> list[int]:
    """The ids in an `eos_token_id`, which is a token id, a list of them, or None.

    Raises NotServed for anything else; `where` names its file."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise NotServed(
            f"eos_token_id of {where} must be a token id or a list of them, not {short(value)}."
        )
    return list(ids)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with the entries of `over`, objects merged key by key (--hf-overrides)."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def short(value: object) -> str:
    """A value from a file as one line of at most 80 ASCII characters, for an error."""
    try:
        text = ascii(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 80 else f"{text[:77]}..."


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest sequence, in tokens, that a text config allows, or None if it states none.

    YaRN multiplies the original length by a factor. Some checkpoints state the product as their
    `max_position_embeddings`, others (as Qwen advises) the original length, so the larger of the
    stated length and the product is returned.
    """
    stated = _count(config.get("max_position_embeddings"))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if stated is None or not isinstance(rope, Mapping):
        return stated
    factor = rope.get("factor")
    if rope.get("rope_type", rope.get("type")) != "yarn" or not isinstance(factor, int | float):
        return stated
    original = _count(rope.get("original_max_position_embeddings")) or stated
    stretched = original * factor
    return max(stated, int(stretched)) if 0 < stretched < 2**31 else stated


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
