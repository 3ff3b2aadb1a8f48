"""Triton versions of `kernels.linear.streams`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs
from .norm_rope import norm_tiles
from .rotation import load_parts

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _write_stream_kernel(
    hidden,  # [M, H]; PARTS: [PARTS, M, H] float32, contiguous
    residual,  # [M, H]
    out,  # [M, H]
    hidden_stride,
    residual_stride,
    out_stride,
    num_rows,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = hidden is whole
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_inputs(PDL)
    part_stride = num_rows.to(tl.int64) * SIZE
    value = load_parts(hidden + row * hidden_stride + column, inside, part_stride, PARTS)
    if ADD:
        other = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        value = value.to(tl.float32) + other.to(tl.float32)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def write_stream(hidden: Tensor, residual: Tensor | None, out: Tensor | None = None) -> Tensor:
    """See `kernels.linear.streams.write_stream`."""
    if out is None:
        assert residual is not None
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    parts = 0
    if hidden.dim() > out.dim():
        assert hidden.is_contiguous()
        parts, hidden = hidden.shape[0], hidden[0]
    rows, size = out.shape
    others = hidden if residual is None else residual
    assert hidden.stride(1) == others.stride(1) == out.stride(1) == 1
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(size))
        _write_stream_kernel[(rows, triton.cdiv(size, block))](
            hidden,
            others,
            out,
            hidden.stride(0),
            others.stride(0),
            out.stride(0),
            rows,
            SIZE=size,
            ADD=residual is not None,
            PARTS=parts,
            BLOCK=block,
            num_warps=4,
            **pdl_options(out),
        )
    return out


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ids"])
def _norm_pair_kernel(
    left,  # [M, H]; IDS: [V, H]
    right,  # [M, H]
    ids,  # [M]
    left_weight,  # [H]
    right_weight,  # [H]
    out,  # [M, 2H], contiguous
    left_stride,
    right_stride,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    IDS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one half of some rows; the order of sums is that of `_rms_norm_kernel`."""
    dtype: tl.constexpr = out.dtype.element_ty
    half = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    known = column < SIZE
    inside = (row < num_rows)[:, None] & known[None, :]
    if NORM:
        w = tl.load(left_weight + column, mask=known & (half == 0), other=0.0)
        w += tl.load(right_weight + column, mask=known & (half == 1), other=0.0)
    wait_for_inputs(PDL)
    if half == 0:
        of = row
        if IDS:
            of = tl.load(ids + row, mask=row < num_rows, other=0).to(tl.int64)
        value = tl.load(left + of[:, None] * left_stride + column[None, :], mask=inside, other=0.0)
    else:
        offset = row[:, None] * right_stride + column[None, :]
        value = tl.load(right + offset, mask=inside, other=0.0)
    if NORM:
        v = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)
        normed = v * scale[:, None]
        if w.dtype != tl.float32:
            normed = normed.to(dtype).to(tl.float32)
        value = (normed * w.to(tl.float32)[None, :]).to(dtype)
    target = out + row[:, None] * (2 * SIZE) + half * SIZE + column[None, :]
    tl.store(target, value, mask=inside)


def norm_pair(
    left: Tensor,
    right: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    ids: Tensor | None = None,
) -> Tensor:
    """See `kernels.linear.streams.norm_pair`."""
    (num_rows, size), device = right.shape, right.device
    assert left.stride(1) == right.stride(1) == 1 and left.dtype == right.dtype
    assert ids is None or ids.stride(0) == 1
    out = torch.empty(num_rows, 2 * size, dtype=right.dtype, device=device)
    if num_rows:
        block, per_program, num_warps = norm_tiles(size)
        _norm_pair_kernel[(triton.cdiv(num_rows, per_program), 2)](
            left,
            right,
            right if ids is None else ids,
            *((right, right) if weights is None else weights),
            out,
            left.stride(0),
            right.stride(0),
            num_rows,
            eps,
            SIZE=size,
            IDS=ids is not None,
            NORM=weights is not None,
            BLOCK=block,
            ROWS=per_program,
            num_warps=num_warps,
            **pdl_options(out),
        )
    return out
