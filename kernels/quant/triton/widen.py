"""Triton kernel that writes the numbers of a tiled weight, all or those of some rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..tiled import TiledWeight, zeros_or_offsets
from .packed_codes import KINDS, plain_numbers
from .plane_widen import widen_planes


@triton.jit
def _widen_kernel(
    words,  # [N, W]
    scales,  # [groups, N / ROW_GROUP], or [groups / P, N, P]; of "fp4" [N, groups] uint8
    zeros,  # [groups, N] uint8, or offsets of the shape of `scales`
    global_scale,  # [N] float32
    super_scales,  # [ceil(K / 256), N], if `scales` are integers
    super_offsets,
    ids,  # [R], if IDS
    out,  # [R, K]
    num_rows,  # R = N, or the number of `ids`
    num_columns,  # K
    num_words,  # W
    row_stride,  # of `scales`
    group_stride,
    zero_stride,
    super_stride,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,  # of a program
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    P: tl.constexpr,  # neighbouring groups of a row
    E8M0: tl.constexpr,
    ZEROS: tl.constexpr,  # 0 = none, 1 = zeros, 2 = offsets
    GLOBAL: tl.constexpr,
    SUPER: tl.constexpr,
    IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * SPANS * WIDTH + tl.arange(0, SPANS * WIDTH)
    is_row, n = row < num_rows, row
    if IDS:
        wait_for_inputs(PDL)
        n = tl.load(ids + row, mask=is_row, other=0).to(tl.int64)
    at = n.to(tl.int64)[:, None] * num_words + word[None, :]
    packed = tl.load(words + at, mask=is_row[:, None] & (word < num_words)[None, :], other=0)
    if not IDS:
        wait_for_inputs(PDL)  # memory of `out` may be in use until then
    for i in tl.static_range(SLICES):
        column = word // WIDTH * (WIDTH * SLICES) + i * WIDTH + word % WIDTH
        inside = is_row[:, None] & (column < num_columns)[None, :]
        group = column // GROUP
        at = (n // ROW_GROUP)[:, None] * row_stride + (group // P)[None, :] * group_stride
        at += (group % P)[None, :]
        s = tl.load(scales + at, mask=inside, other=0)
        if KIND == 3:
            if E8M0:  # 0 is 2 ** -127
                s = tl.maximum(s.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
            else:
                s = s.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        s = s.to(tl.float32)
        if SUPER:
            of_super = column[None, :] // 256 * super_stride + n[:, None]
            s *= tl.load(super_scales + of_super, mask=inside, other=0).to(tl.float32)
        if GLOBAL:
            s *= tl.load(global_scale + n, mask=is_row, other=0.0)[:, None]
        number = plain_numbers(packed, i, KIND)
        zero = number
        if ZEROS:
            at = (group // P)[None, :] * zero_stride + n[:, None] * P + (group % P)[None, :]
            zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
            if SUPER and ZEROS == 2:
                of_super = column[None, :] // 256 * super_stride + n[:, None]
                zero *= tl.load(super_offsets + of_super, mask=inside, other=0).to(tl.float32)
        if ZEROS == 1:
            number -= zero
        elif ZEROS == 0 and KIND == 2:
            number -= 8.0
        number *= s
        if ZEROS == 2:
            number += zero
        place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(out + place, number.to(out.dtype.element_ty), mask=inside)


def widen(weight: TiledWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """The numbers [N, K] of a weight, each rounded once, with columns in the stored order.

    With `ids` [R], of an integer type, only these rows: [R, K].
    """
    if weight.high is not None:
        return widen_planes(weight, dtype, ids)
    columns = weight.columns
    rows = weight.shape[0] if ids is None else ids.numel()
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    width, num_words, is_fp4 = weight.slice_width, weight.words.shape[1], weight.kind == "fp4"
    spans = max(256 // width, 1)
    scales, factors = weight.scales, weight.global_scale
    zeros, mode = zeros_or_offsets(weight)
    strides = scales.stride() if is_fp4 else (scales.stride(1), scales.stride(0))
    _widen_kernel[(triton.cdiv(rows, 8), triton.cdiv(num_words, spans * width))](
        weight.words,
        scales.view(torch.uint8) if is_fp4 else scales,
        out if zeros is None else zeros,
        out if factors is None else factors,
        out if weight.super_scales is None else weight.super_scales,
        out if weight.super_offsets is None else weight.super_offsets,
        out if ids is None else ids.contiguous(),
        out,
        rows,
        columns,
        num_words,
        *strides,
        0 if zeros is None else zeros.stride(0),
        0 if weight.super_scales is None else weight.super_scales.stride(0),
        ROWS=8,
        SPANS=spans,
        WIDTH=width,
        SLICES=weight.slices,
        KIND=KINDS[weight.kind],
        GROUP=1 << 30 if weight.group >= columns else weight.group,
        ROW_GROUP=weight.row_group,
        P=scales.shape[2] if scales.dim() == 3 else 1,
        E8M0=scales.dtype == torch.uint8,
        ZEROS=mode,
        GLOBAL=factors is not None,
        SUPER=weight.super_scales is not None,
        IDS=ids is not None,
        num_warps=8,
        **pdl_options(weight.words),
    )
    return out


hash_functions(globals())
