"""Triton version of `kernels.attention.mla`: one matrix product per head, without copies."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _project_heads_kernel(
    x,  # [T, H, K]
    weight,  # [H, K, N]
    out,  # [T, H, N], contiguous
    num_rows,  # T
    x_stride_t,
    x_stride_h,
    w_stride_h,
    w_stride_k,
    w_stride_n,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    target = out + (row[:, None] * HEADS + head) * N + column[None, :]
    tl.store(
        target, total.to(out.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :]
    )


def project_heads(x: Tensor, weight: Tensor, fixed: bool = False) -> Tensor:
    """Multiply x [T, H, K] by weight [H, K, N], head by head; returns [T, H, N].

    Strides are free, except that K must be contiguous in x. If `fixed`, all numbers of rows have
    the same tiles, since the instructions of small tiles may round differently.
    """
    rows, heads, depth = x.shape
    width = weight.shape[2]
    assert x.stride(2) == 1 and weight.shape[:2] == (heads, depth)
    out = torch.empty((rows, heads, width), dtype=x.dtype, device=x.device)
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
        *x.stride()[:2],
        *weight.stride(),
        HEADS=heads,
        K=depth,
        N=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    return out
