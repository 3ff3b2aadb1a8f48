"""Owns what is decided from a config.json alone: which architectures and quantisations are served.

The server asks before it starts a worker or downloads weights; the worker asks again.
`runner/models/registry.py` says which class serves each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# model_type -> the architecture it means where a config names none
ARCHITECTURE_OF_TYPE: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
}
ARCHITECTURES = tuple(ARCHITECTURE_OF_TYPE.values())
QUANTISATIONS = ("fp8",)  # in blocks, as DeepSeek V3's
# GGUF architecture -> model_type
GGUF_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}


# Left out of downloads and folders: the same weights once more, in Mistral's own form.
OTHER_WEIGHTS = "consolidated*.safetensors"


class NotServed(Exception):
    """The model cannot be served; the text is one sentence."""


def served_architecture(config: Mapping[str, Any]) -> str:
    """The architecture of a config.json's content that is served; NotServed if there is none."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise NotServed(f"architectures must be a list of names, not {short(named)}.")
    kind = config.get("model_type")
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


def check_quantisation(config: Mapping[str, Any]) -> None:
    """NotServed if the weights are quantised in a form that cannot be read."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in QUANTISATIONS:
        raise NotServed(
            f"the quantisation {short(method)} is not supported; supported: "
            f"{', '.join(QUANTISATIONS)} in safetensors, and the forms of GGUF files."
        )
    block = settings.get("weight_block_size")
    if block is not None and not is_block_size(block):
        raise NotServed(f"weight_block_size must be two positive integers, not {short(block)}.")


def is_block_size(value: object) -> bool:
    """Whether it is a list of rows and columns."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and 0 < size < 2**31 for size in value)
    )


def check_gguf_architecture(name: object) -> str:
    """The model_type of a GGUF architecture; NotServed if it is not supported."""
    if not isinstance(name, str) or name not in GGUF_TYPES:
        raise NotServed(
            f"GGUF architecture {short(name)} is not supported; supported: "
            f"{', '.join(sorted(GGUF_TYPES))}."
        )
    return GGUF_TYPES[name]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, objects merged key by key: --hf-overrides over a config.json."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def short(value: object) -> str:
    """A value from a file in one line of at most 80 characters."""
    try:
        text = ascii(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 80 else f"{text[:77]}..."
