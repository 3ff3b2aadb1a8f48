"""Owns how many tokens a model is made for, as its config states it: the server refuses longer
limits before the worker starts, and the worker takes the number as the default limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a text config (as in config.json), or None if it states none.

    YaRN stretches the original length by a factor. Some checkpoints state the product as their
    `max_position_embeddings`, others (Qwen's advice) the original length: the larger one counts.
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
