"""Triton kernel that writes the numbers of a weight of two planes, all or those of some rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..planes import plane_slices
from ..tiled import TiledWeight
from .plane_codes import PLANE_KINDS, plain_plane_codes


@triton.jit
def _of_groups(source, supers, n, column, stride, inside, GROUP: tl.constexpr, SUPER: tl.constexpr):
    """Scales or offsets in float32. `source`: [groups / P, N, P]; `supers`: [ceil(K / 256), N]."""
    TYPE: tl.constexpr = source.dtype.element_ty
    PER: tl.constexpr = 32 // TYPE.primitive_bitwidth
    group = column // GROUP
    at = (group // PER)[None, :] * (stride * PER) + n[:, None] * PER + (group % PER)[None, :]
    number = tl.load(source + at, mask=inside, other=0).to(tl.float32)
    if SUPER:
        at = (column // 256)[None, :] * stride + n[:, None]
        number *= tl.load(supers + at, mask=inside, other=0).to(tl.float32)
    return number


@triton.jit
def _plane_widen_kernel(
    words,  # [N, W]
    high,  # [N, W2]
    scales,  # [groups / P, N, P]
    offsets,  # of the same shape
    super_scales,  # [ceil(K / 256), N], if SUPER
    super_offsets,
    ids,  # [R], if IDS
    out,  # [R, K]
    num_rows,  # R = N, or the number of `ids`
    num_columns,  # K
    num_words,  # W
    num_high,  # W2
    stride,  # N, or that of the matrix that the rows are of
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,  # of a program
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    SUPER: tl.constexpr,
    IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * SPANS * 16 + tl.arange(0, SPANS * 16)
    is_row, n = row < num_rows, row
    wait_for_inputs(PDL)  # memory of `out` may be in use until then
    if IDS:
        n = tl.load(ids + row, mask=is_row, other=0)
    n = n.to(tl.int64)
    at = n[:, None] * num_high + word[None, :]
    rest = tl.load(high + at, mask=is_row[:, None] & (word < num_high)[None, :], other=0)
    for i in tl.static_range(SLICES):
        column = word // 16 * (16 * SLICES) + i * 16 + word % 16
        inside = is_row[:, None] & (column < num_columns)[None, :]
        at = n[:, None] * num_words + (column // 64 * 16 + word % 16)[None, :]
        low = tl.load(words + at, mask=inside, other=0)
        number = plain_plane_codes(low, rest, i, KIND).to(tl.float32)
        if not OFFSETS:
            number -= 8 << (KIND - 3)
        number *= _of_groups(scales, super_scales, n, column, stride, inside, GROUP, SUPER)
        if OFFSETS:
            number += _of_groups(offsets, super_offsets, n, column, stride, inside, GROUP, SUPER)
        place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(out + place, number.to(out.dtype.element_ty), mask=inside)


def widen_planes(weight: TiledWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """See `widen.widen`; of a weight of two planes."""
    assert weight.high is not None
    rows = weight.shape[0] if ids is None else ids.numel()
    out = torch.empty(rows, weight.columns, dtype=dtype, device=weight.device)
    num_high, spans = weight.high.shape[1], 4
    _plane_widen_kernel[(triton.cdiv(rows, 8), triton.cdiv(num_high, spans * 16))](
        weight.words,
        weight.high,
        weight.scales,
        out if weight.offsets is None else weight.offsets,
        out if weight.super_scales is None else weight.super_scales,
        out if weight.super_offsets is None else weight.super_offsets,
        out if ids is None else ids.contiguous(),
        out,
        rows,
        weight.columns,
        weight.words.shape[1],
        num_high,
        weight.scales.stride(0) // weight.scales.shape[2],
        ROWS=8,
        SPANS=spans,
        SLICES=plane_slices(weight.kind),
        KIND=PLANE_KINDS[weight.kind],
        GROUP=weight.group,
        OFFSETS=weight.offsets is not None,
        SUPER=weight.super_scales is not None,
        IDS=ids is not None,
        num_warps=4,
        **pdl_options(weight.words),
    )
    return out


hash_functions(globals())
