"""Rotary embedding of heads in registers, for kernels that go on with them."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions
from ...linear.triton.norm_rope import load_parts


@triton.jit
def rotated(
    rows,  # [R] pointers to heads
    inside,  # [R, D]
    gain,  # [D], weight of the norm of each head
    cos,  # [R, D]
    sin,  # [R, D], with the sign of its term
    dim,  # [D]
    partner,  # [D]
    part_stride,
    eps,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """[R, D] float32."""
    x = load_parts(rows[:, None] + dim[None, :], inside, part_stride, PARTS).to(tl.float32)
    swapped = load_parts(rows[:, None] + partner[None, :], inside, part_stride, PARTS)
    swapped = swapped.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        own = tl.load(gain + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        other = tl.load(gain + partner, mask=dim < DIM, other=0.0).to(tl.float32)
        x, swapped = x * scale * own[None, :], swapped * scale * other[None, :]
    return x * cos + swapped * sin


@triton.jit
def angles(
    cos_sin,
    position,
    dim,
    pair,
    is_first,
    ROT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """([R, D] cosines, [R, D] signed sines) of rows at these positions; float32."""
    row = cos_sin + position[:, None] * ROT + pair[None, :]
    if ROT == BLOCK:
        cos, sin = tl.load(row), tl.load(row + ROT // 2)
    else:
        rotates = (dim < ROT)[None, :]
        cos = tl.load(row, mask=rotates, other=1.0)
        sin = tl.load(row + ROT // 2, mask=rotates, other=0.0)
    sin = sin.to(tl.float32)
    return cos.to(tl.float32), tl.where(is_first[None, :], -sin, sin)


hash_functions(globals())
