"""The argument that describes a rotary embedding to its reference and its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

HeadNorms = tuple[Tensor, Tensor, float]  # weights of query and key heads, each [D], and eps


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of query and key heads, and the norm that may precede it."""

    positions: Tensor  # [>= T] int64
    cos_sin_cache: Tensor  # [max_position, rot_dim], cos in the first half of a row, then sin
    interleaved: bool = False  # pairs are (2i, 2i + 1) instead of (i, i + rot_dim / 2)
    norms: HeadNorms | None = None  # applied to each head before it is rotated
    # One kernel should attend if it can: the next launch may begin when the last kernel does.
    whole: bool = False
