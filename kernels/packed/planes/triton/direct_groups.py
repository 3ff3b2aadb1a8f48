"""Triton linear layer for one row with weights in small groups, whose words go to registers.

As in `packed_direct`, lanes load whole operands of the tensor cores, so words pass neither shared
memory nor other lanes. Each warp takes a unit of 8 groups at a time. The groups of the input are
the 8 columns of the right operand, and each group of the weights is multiplied with all of them.
Only the product with its own group is kept: a diagonal. So scales and offsets of all 8 groups
multiply one tile of sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions, pdl_options, wait_for_inputs
from ....linear.linear import Norm
from ....quant.tiled import TiledWeight
from ....quant.triton.packed_codes import KINDS
from ....quant.triton.plane_codes import PLANE_KINDS, unit_of
from ...kinds import GATE_UP, PARTS, PLAIN, Direct, fits_small_groups
from ...triton.arguments import empty_output, parts_of, product_arguments, taken
from ...triton.packed_direct import _finish
from ...triton.packed_lanes import lanes_of, load_tile, rows_of_tile, wide, words_of
from .group_lanes import (
    first_columns,
    left_of_group,
    load_words,
    right_of_groups,
    scale_lanes,
    scales_by_row,
    scales_inside,
    tile_numbers,
)


@triton.jit
def _input(
    x, gain, squares, unit, step, last, num_inputs,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The right operand of a step, times the norm's weight, and the sums of the input's squares."""
    SPANS: tl.constexpr = squares.shape[1]
    HALF: tl.constexpr = 16 if WIDTH == 16 else 4  # columns from a half to the next
    s = unit + step + tl.arange(0, SPANS)
    own = (tl.arange(0, SPANS)[None, :] * 8 + tl.arange(0, 8)[:, None])[:, :, None] * GROUP
    own += first_columns(WIDTH)[None, None]
    start = wide(unit) * (8 * GROUP)
    loaded = ()
    for u in tl.static_range(GROUP // 16):
        at = step * 8 * GROUP + u * HALF
        inside = (s < last)[None, :, None] & (own + (unit * 8 * GROUP + at) < num_inputs)
        half = load_tile(x + own + start + at, inside, MASKED, "")
        if NORM:
            value = half.to(tl.float32)
            squares += value * value
            factor = load_tile(gain + own + start + at, inside, MASKED, "")
            half = (value * factor.to(tl.float32)).to(half.dtype)
        loaded += (half,)
    return right_of_groups(loaded[0], loaded[GROUP // 16 - 1], GROUP), squares


@triton.jit
def _load(
    pointers,  # to words of rows 0 to 7 and 8 to 15 of both planes, scales, offsets and super ones
    insides, sizes, unit, step, last,
    FORM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the step from `unit + step` needs of 16 weight rows: a tuple of pairs of words of both
    halves of the rows by tile, then of the second plane, then scales and offsets, and supers."""
    OFFSETS: tl.constexpr = FORM[3]
    SUPER: tl.constexpr = FORM[4]
    P: tl.constexpr = FORM[5]
    UNITS: tl.constexpr = FORM[6]
    num_words, num_groups, stride, super_stride = sizes
    SPANS: tl.constexpr = pointers[0].shape[1]
    s = unit + step + tl.arange(0, SPANS)
    is_unit = s < last
    loaded = load_words(pointers, insides, s, unit, step, num_words, is_unit, FORM, MASKED)
    at = (wide(unit) + step) * (8 // P * stride)
    for field in tl.static_range(2):
        for half in tl.static_range(2):
            if OFFSETS or field == 0:
                there = scales_inside(s, is_unit, insides[half], num_groups, P)
                loaded += (load_tile(pointers[4 + 2 * field + half] + at, there, MASKED, ""),)
            else:
                loaded += (is_unit,)
    if SUPER:
        row = (s // UNITS)[:, None] * super_stride
        there = is_unit[:, None] & insides[2][None, :]
        loaded += (load_tile(pointers[8] + row, there, MASKED, ""),)
        if OFFSETS:
            loaded += (load_tile(pointers[9] + row, there, MASKED, ""),)
        else:
            loaded += (is_unit,)
    else:
        loaded += (is_unit, is_unit)
    return loaded


@triton.jit
def _add(sums, loaded, xt, FORM: tl.constexpr, UNIT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Add the products of a step to the sums [SPANS, 16, 8]."""
    LOWS: tl.constexpr = FORM[0]
    WIDTH: tl.constexpr = FORM[1]
    KIND: tl.constexpr = FORM[2]
    OFFSETS: tl.constexpr = FORM[3]
    SUPER: tl.constexpr = FORM[4]
    P: tl.constexpr = FORM[5]
    PER: tl.constexpr = xt.shape[1] // WIDTH  # slices of a group
    COUNT: tl.constexpr = 8 // LOWS  # groups in a tile
    column = tl.arange(0, 8)[None, None, :]
    own = tl.zeros([xt.shape[0], 16, 8], tl.float32)
    high_a, high_b = loaded[2 * LOWS], loaded[2 * LOWS + 1]
    if KIND >= 4:
        high_a, high_b = words_of(high_a), words_of(high_b)
    for t in tl.static_range(LOWS):
        a = tile_numbers(loaded[t], high_a, t, KIND, xt.dtype, OFFSETS, ASSEMBLY)
        b = tile_numbers(loaded[LOWS + t], high_b, t, KIND, xt.dtype, OFFSETS, ASSEMBLY)
        for i in tl.static_range(COUNT):
            part = tl.dot(left_of_group(a, b, i * PER, PER, WIDTH), xt)
            own = tl.where(column == t * COUNT + i, part, own)
    own *= UNIT
    scales = scales_by_row(loaded[2 * LOWS + 2], loaded[2 * LOWS + 3], P)
    if OFFSETS:
        total = tl.dot(tl.full([xt.shape[0], 16, xt.shape[1]], 1.0, xt.dtype), xt)
        if KIND == 2:  # from whose codes 8 was subtracted
            own += 8.0 * total
        less = scales_by_row(loaded[2 * LOWS + 4], loaded[2 * LOWS + 5], P) * total
        if SUPER:
            less *= loaded[2 * LOWS + 7].to(tl.float32)[:, :, None]
        sums += less
    own *= scales
    if SUPER:
        own *= loaded[2 * LOWS + 6].to(tl.float32)[:, :, None]
    return sums + own


@triton.jit(do_not_specialize=["split_k", "row_stride"])
def _direct_groups_kernel(
    words,  # [N, W / 2] int32, pairs of words; gated: [2 N, W / 2]
    high,  # [N, W2 / 2] int32, of two planes
    x,  # [K]
    gain,  # [K], weight of the norm
    scales,  # [groups / P, N, P]
    offsets,  # of the same shape
    super_scales,  # [ceil(K / 256), N], if SUPER
    super_offsets,
    bias,  # [N] or [2 N]
    residual,  # [N]
    out,  # [N], or [split_k, N] float32
    eps,
    num_outputs,  # N
    num_inputs,  # K
    num_words,  # W
    num_high,  # W2
    num_groups,
    stride,  # of `scales` and `offsets`
    row_stride,  # P
    super_stride,
    part_units,  # of a part, a multiple of SPANS * AHEAD
    num_units,
    split_k,  # number of parts
    SPANS: tl.constexpr,  # the warps
    AHEAD: tl.constexpr,  # steps whose words are in registers or on their way
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,  # words of a tile
    LOWS: tl.constexpr,  # tiles of a unit
    KIND: tl.constexpr,
    P: tl.constexpr,  # neighbouring groups of a row
    UNIT: tl.constexpr,  # what the products are multiplied by
    OFFSETS: tl.constexpr,
    SUPER: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,  # no row and no column is beyond the end
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    HEIGHT: tl.constexpr = 8 if MODE == 2 else 16
    FORM: tl.constexpr = (LOWS, WIDTH, KIND, OFFSETS, SUPER, P, 256 // (8 * GROUP))
    part = tl.program_id(0) % split_k
    start = tl.program_id(0) // split_k * HEIGHT
    first = part * part_units
    last = tl.minimum(first + part_units, num_units)
    n, low, upper, insides = rows_of_tile(start, num_outputs, MODE)
    none = tl.arange(0, SPANS)[:, None] * 0 + n[None, :]
    pointers = (
        lanes_of(words, low, num_words // 2, LOWS * WIDTH // 2, SPANS, WIDTH // 2),
        lanes_of(words, upper, num_words // 2, LOWS * WIDTH // 2, SPANS, WIDTH // 2),
        lanes_of(high, low, num_high // 2, WIDTH // 2, SPANS, WIDTH // 2),
        lanes_of(high, upper, num_high // 2, WIDTH // 2, SPANS, WIDTH // 2),
        scale_lanes(scales, low, stride, row_stride, SPANS, P),
        scale_lanes(scales, upper, stride, row_stride, SPANS, P),
        scale_lanes(offsets, low, stride, row_stride, SPANS, P),
        scale_lanes(offsets, upper, stride, row_stride, SPANS, P),
        super_scales + none,
        super_offsets + none,
    )
    sizes = num_words, num_groups, stride, super_stride
    loaded = ()
    for i in tl.static_range(AHEAD):
        loaded += (_load(pointers, insides, sizes, first, i * SPANS, last, FORM, not EVEN),)
    wait_for_inputs(PDL)
    sums = tl.zeros([SPANS, 16, 8], tl.float32)
    squares = tl.zeros([8, SPANS, 16], tl.float32)
    for unit in range(first, last, SPANS * AHEAD):
        more = ()
        for i in tl.static_range(AHEAD):
            xt, squares = _input(
                *(x, gain, squares, unit, i * SPANS, last, num_inputs),
                *(GROUP, WIDTH, NORM, not EVEN),
            )
            sums = _add(sums, loaded[i], xt, FORM, UNIT, ASSEMBLY)
            ahead = unit + SPANS * AHEAD
            more += (_load(pointers, insides, sizes, ahead, i * SPANS, last, FORM, True),)
        loaded = more
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / num_inputs + eps)
    y = tl.sum(tl.sum(sums, 2), 0)
    _finish(
        *(y, n, insides[2], scales, bias, residual, out, part, num_outputs, scale),
        *(False, NORM, BIAS, RESIDUAL, MODE, ACTIVATION),
    )


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Direct,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.packed.linear`, whose operations are the modes; x [1, K] has the weight's order
    of columns."""
    assert x.shape[0] == 1 and x.stride(1) == 1 and weight.words.is_contiguous()
    assert fits_small_groups(weight) and (norm is None or mode != PARTS)
    num_inputs = x.shape[1]
    num_outputs = weight.shape[0] // (2 if mode == GATE_UP else 1)
    height = 8 if mode == GATE_UP else 16
    columns = 8 * weight.group  # of a unit
    num_units = triton.cdiv(num_inputs, columns)
    step = choice.num_warps * choice.ahead
    split_k, part_units = parts_of(num_units, choice.split_k if mode == PARTS else 1, step)
    out = empty_output(x, num_outputs, mode, split_k)
    even = num_outputs % height == 0 and num_units % step == 0 and num_inputs % columns == 0
    high = weight.words if weight.high is None else weight.high
    _direct_groups_kernel[(triton.cdiv(num_outputs, height) * split_k,)](
        weight.words.view(torch.int32),
        high.view(torch.int32),
        x,
        scales=weight.scales,
        offsets=x if weight.offsets is None else weight.offsets,
        super_scales=x if weight.super_scales is None else weight.super_scales,
        super_offsets=x if weight.super_offsets is None else weight.super_offsets,
        out=out,
        num_high=0 if weight.high is None else weight.high.shape[1],
        num_groups=triton.cdiv(num_inputs, weight.group),
        stride=weight.scales.stride(0),
        row_stride=weight.scales.stride(1),
        super_stride=0 if weight.super_scales is None else weight.super_scales.stride(0),
        part_units=part_units,
        num_units=num_units,
        split_k=split_k,
        **taken(
            _direct_groups_kernel,
            product_arguments(x, weight, mode, bias, activation, norm, residual),
        ),
        SPANS=choice.num_warps,
        AHEAD=choice.ahead,
        GROUP=weight.group,
        WIDTH=weight.slice_width,
        LOWS=columns // (weight.slice_width * slices_of_word(weight)),
        KIND=(KINDS | PLANE_KINDS)[weight.kind],
        P=weight.scales.shape[2] if weight.scales.dim() == 3 else 1,
        UNIT=unit_of_numbers(weight, x),
        OFFSETS=weight.offsets is not None,
        SUPER=weight.super_scales is not None,
        EVEN=even,
        num_warps=choice.num_warps,
        num_stages=1,
        # Left to itself, the compiler would rather spill a few registers than exceed 80.
        maxnreg=128 if choice.ahead == 1 and _is_short(weight) else None,
        **pdl_options(x),
    )
    return out


def _is_short(weight: TiledWeight) -> bool:
    """Whether a step of one row needs few registers: scales of one level, and less than 8 bits."""
    return weight.super_scales is None and weight.kind != "int8"


def slices_of_word(weight: TiledWeight) -> int:
    """Codes in a word of the first plane."""
    return 2 if weight.kind == "int8" else 4


def unit_of_numbers(weight: TiledWeight, x: Tensor) -> float:
    """What numbers are divided by in the kernel."""
    divided = weight.high is not None or (weight.kind == "int4" and x.dtype == torch.bfloat16)
    return unit_of(x.dtype, not x.is_cpu) if divided else 1.0


hash_functions(globals())
