"""Reads a model's context length from its config.

The server refuses a longer --max-model-len before the worker starts; the worker uses the context
length as the default limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
