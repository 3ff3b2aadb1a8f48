"""Triton version of `kernels.attention.compressed.tail_rotary`: some heads of a token each."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUES = 4096  # of one program


@triton.jit
def rotate_pairs(even, odd, position, cos_sin_cache, ROT: tl.constexpr, HALF: tl.constexpr):
    """Rotate the last ROT / 2 of the HALF pairs (even, odd) by `position`."""
    pair = tl.arange(0, HALF) - (HALF - ROT // 2)
    rotates = pair >= 0
    row = cos_sin_cache + position * ROT + pair
    cos = tl.load(row, mask=rotates, other=1.0)
    sin = tl.load(row + ROT // 2, mask=rotates, other=0.0)
    return even, odd, cos, sin


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _tail_rotary_kernel(
    x,  # [M, heads, DIM]
    out,  # [M, heads, DIM], contiguous
    positions,  # [M] int64
    cos_sin_cache,  # [positions, ROT] float32
    weight,  # [DIM] float32
    stride_t,
    stride_h,
    num_heads,
    eps,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, DIM)
    inside = (head < num_heads)[:, None]
    source = x + token * stride_t + head[:, None].to(tl.int64) * stride_h + column[None, :]
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / DIM + eps)
        values = values * inverse[:, None]
        if WEIGHTED:
            values = values * tl.load(weight + column)[None, :]
        values = values.to(dtype).to(tl.float32)  # round where the reference does
    even, odd = tl.split(tl.reshape(values, (HEADS, DIM // 2, 2)))
    even, odd, cos, sin = rotate_pairs(
        even, odd, tl.load(positions + token), cos_sin_cache, ROT, DIM // 2
    )
    if INVERSE:
        sin = -sin
    first = even * cos[None, :] - odd * sin[None, :]
    second = odd * cos[None, :] + even * sin[None, :]
    rotated = tl.reshape(tl.join(first, second), (HEADS, DIM))
    target = out + (token * num_heads + head[:, None]) * DIM + column[None, :]
    tl.store(target, rotated.to(dtype), mask=inside)


def tail_rotary(
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float | None = None,
    weight: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """See `kernels.attention.compressed.tail_rotary.tail_rotary`."""
    num_tokens, num_heads, dim = x.shape
    assert x.stride(2) == 1 and dim & (dim - 1) == 0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    heads = min(triton.next_power_of_2(num_heads), max(1, _VALUES // dim))
    _tail_rotary_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x, out, positions, cos_sin_cache, cos_sin_cache if weight is None else weight,
        x.stride(0), x.stride(1), num_heads, eps or 0.0,
        DIM=dim, ROT=cos_sin_cache.shape[1], HEADS=heads, NORM=eps is not None,
        WEIGHTED=weight is not None, INVERSE=inverse,
    )  # fmt: skip
    return out
