"""Rotary embedding of heads in registers, as parts of other kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions


@triton.jit
def load_parts(pointers, inside, stride, PARTS: tl.constexpr):
    """Load the values at `pointers`, or sum PARTS parts that are `stride` apart, in order and in
    float32."""
    value = tl.load(pointers, mask=inside, other=0.0)
    if PARTS > 0:
        value = value.to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(pointers + part * stride, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def pairs(dim, ROT: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each dim [D]: (partner in its pair, number of the pair, whether it is the first member).

    Only the first ROT dims rotate; a dim beyond them is its own partner.
    """
    half: tl.constexpr = ROT // 2
    if INTERLEAVED:
        partner, pair, is_first = dim ^ 1, dim // 2, dim % 2 == 0
    else:
        partner, pair, is_first = (dim + half) % ROT, dim % half, dim < half
    return tl.where(dim < ROT, partner, dim), pair, is_first


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
    """Load heads, sum their parts, norm and rotate them; [R, D] float32."""
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
    """Load the cosines and signed sines of rows at `position` [R], both [R, D] float32."""
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
