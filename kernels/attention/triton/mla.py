"""Triton version of `kernels.attention.mla`: one matrix product per head, without copies, and the
rotation of queries beside the making of cached rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...linear.rotation import Rotation
from ...linear.triton.rotation import pairs


@triton.jit(do_not_specialize=["num_rows"])
def _project_heads_kernel(
    x,  # [T, H, K]
    weight,  # [H, K, N]
    out,  # [T, H, N]
    num_rows,  # T
    x_stride_t,
    x_stride_h,
    out_stride_t,
    out_stride_h,
    w_stride_h,
    w_stride_k,
    w_stride_n,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    head = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_inside, column_inside = row < num_rows, column < N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, K, BLOCK_K):
        k = at + inner
        inside = k < K
        left = tl.load(
            x + row[:, None] * x_stride_t + head * x_stride_h + k[None, :],
            mask=row_inside[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + head * w_stride_h + k[:, None] * w_stride_k + column[None, :] * w_stride_n,
            mask=inside[:, None] & column_inside[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    target = out + row[:, None] * out_stride_t + head * out_stride_h + column[None, :]
    tl.store(
        target, total.to(out.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :]
    )


def project_heads(
    x: Tensor, weight: Tensor, fixed: bool = False, out: Tensor | None = None
) -> Tensor:
    """Multiply x [T, H, K] by weight [H, K, N], head by head; returns [T, H, N], `out` if given.

    Strides are free, except that K must be contiguous in x and N in `out`. If `fixed`, all numbers
    of rows have the same tiles, since the instructions of small tiles may round differently.
    """
    rows, heads, depth = x.shape
    width = weight.shape[2]
    assert x.stride(2) == 1 and weight.shape[:2] == (heads, depth)
    if out is None:
        out = torch.empty((rows, heads, width), dtype=x.dtype, device=x.device)
    assert out.shape == (rows, heads, width) and out.stride(2) == 1
    if rows == 0:
        return out
    # Partial tiles are masked; a matrix unit needs at least 16 rows.
    block_m = 64 if fixed else min(64, max(16, triton.next_power_of_2(rows)))
    block_n = min(128, max(16, triton.next_power_of_2(width)))
    block_k = min(64, max(16, triton.next_power_of_2(depth)))
    grid = (triton.cdiv(rows, block_m), triton.cdiv(width, block_n), heads)
    _project_heads_kernel[grid](
        x,
        weight,
        out,
        rows,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        K=depth,
        N=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        **pdl_options(x),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _latent_rows_kernel(
    heads,  # [T, HEADS, ROT], the rotated part of the queries
    down,  # [T, LATENT + ROT], a token's latent and the key that all heads share
    positions,  # [T] int64
    cos_sin,  # [max_position, ROT]
    gain,  # [LATENT], weight of the latent's norm
    query,  # [T, HEADS, LATENT + ROT], contiguous; the rotated part is written
    row_out,  # [T, LATENT + ROT], contiguous
    heads_stride_t,
    heads_stride_h,
    down_stride,
    eps,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, 0) makes the cached row, the others rotate the queries of BLOCK_H heads."""
    dtype: tl.constexpr = query.dtype.element_ty
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim, WIDTH = tl.arange(0, BLOCK_R), LATENT + ROT
    rotates = (dim < ROT)[None, :]
    partner, pair, is_first = pairs(dim, ROT, INTERLEAVED)
    wait_for_inputs(PDL)
    angle = cos_sin + tl.load(positions + token) * ROT + pair[None, :]
    cos = tl.load(angle, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(angle + ROT // 2, mask=rotates, other=0.0).to(tl.float32)
    sin = tl.where(is_first[None, :], -sin, sin)
    if block == 0:
        column = tl.arange(0, BLOCK_L)
        inside = column < LATENT
        own, out = down + token * down_stride, row_out + token * WIDTH
        value = tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(gain + column, mask=inside, other=0.0)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps)
        if w.dtype != tl.float32:  # a float32 weight is applied before rounding
            normed = normed.to(dtype).to(tl.float32)
        tl.store(out + column, (normed * w.to(tl.float32)).to(dtype), mask=inside)
        key = tl.load(own + LATENT + dim[None, :], mask=rotates, other=0.0).to(tl.float32)
        swapped = tl.load(own + LATENT + partner[None, :], mask=rotates, other=0.0).to(tl.float32)
        tl.store(out + LATENT + dim[None, :], (key * cos + swapped * sin).to(dtype), mask=rotates)
    else:
        head = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        there = rotates & (head < HEADS)
        source = heads + token * heads_stride_t + head * heads_stride_h
        x = tl.load(source + dim[None, :], mask=there, other=0.0).to(tl.float32)
        other = tl.load(source + partner[None, :], mask=there, other=0.0).to(tl.float32)
        target = query + (token * HEADS + head) * WIDTH + LATENT + dim[None, :]
        tl.store(target, (x * cos + other * sin).to(dtype), mask=there)


def latent_rows(
    heads: Tensor, down: Tensor, query: Tensor, rotation: Rotation, gain: Tensor, eps: float
) -> Tensor:
    """Make the cached rows, and rotate the queries' last values: see `mla.queries_and_rows`.

    heads: [T, H, rot_dim]; down: [T, latent + rot_dim]; query: [T, H, latent + rot_dim], of which
    the last rot_dim values are written. Returns rows [T, 1, latent + rot_dim].
    """
    num_tokens, num_heads, rot_dim = heads.shape
    width = query.shape[2]
    row = torch.empty(num_tokens, 1, width, dtype=query.dtype, device=query.device)
    assert rotation.cos_sin_cache.is_contiguous() and rotation.cos_sin_cache.shape[1] == rot_dim
    assert query.is_contiguous() and down.stride(1) == heads.stride(2) == 1
    if num_tokens:
        block_h = min(16, triton.next_power_of_2(num_heads))
        _latent_rows_kernel[(num_tokens, 1 + triton.cdiv(num_heads, block_h))](
            heads,
            down,
            rotation.positions,
            rotation.cos_sin_cache,
            gain,
            query,
            row,
            heads.stride(0),
            heads.stride(1),
            down.stride(0),
            eps,
            HEADS=num_heads,
            LATENT=width - rot_dim,
            ROT=rot_dim,
            INTERLEAVED=rotation.interleaved,
            BLOCK_H=block_h,
            BLOCK_L=triton.next_power_of_2(width - rot_dim),
            BLOCK_R=triton.next_power_of_2(rot_dim),
            num_warps=2,
            **pdl_options(query),
        )
    return row


hash_functions(globals())
