"""Triton linear layer for 2 to 16 rows with weights in small groups, whose words go to registers.

As `direct_groups`, but the columns of the right operand are rows of the input: 8 of them, or twice
8. Each group of a weight is multiplied with its own part of them, so no arithmetic is wasted, and
its scale multiplies the sums of its 16 weight rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions, pdl_options, wait_for_inputs
from ....linear.triton.gemv import gated
from ....quant.tiled import TiledWeight
from ....quant.triton.plane_scales import scale_in
from ...kinds import GATE_UP, PARTS, PLAIN, Direct, fits_few_rows
from ...triton.arguments import empty_output, parts_of, product_arguments, scale_arguments, taken
from ...triton.packed_lanes import lanes_of, load_tile, rows_of_tile, wide, words_of
from .direct_groups import slices_of_word, unit_of_numbers
from .group_lanes import (
    first_columns,
    left_of_group,
    load_words,
    right_of_groups,
    tile_numbers,
)


@triton.jit
def _load(
    pointers,  # as of `load_words`; then to registers of scales and of offsets, and super ones
    insides, sizes, unit, step, last,
    FORM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the step from `unit + step` needs of 16 weight rows: words as `load_words`, then
    registers [SPANS, 16] of scales and of offsets, and super ones."""
    OFFSETS: tl.constexpr = FORM[3]
    SUPER: tl.constexpr = FORM[4]
    PER: tl.constexpr = FORM[5]
    UNITS: tl.constexpr = FORM[6]
    num_words, num_registers, stride, super_stride = sizes
    SPANS: tl.constexpr = pointers[0].shape[1]
    s = unit + step + tl.arange(0, SPANS)
    is_unit = s < last
    loaded = load_words(pointers, insides, s, unit, step, num_words, is_unit, FORM, MASKED)
    for field in tl.static_range(2):
        for r in tl.static_range(8 // PER):
            if OFFSETS or field == 0:
                at = s * (8 // PER) + r
                there = (is_unit & (at < num_registers))[:, None] & insides[2][None, :]
                register = pointers[4 + field] + (at * stride)[:, None]
                loaded += (load_tile(register, there, MASKED, ""),)
            else:
                loaded += (is_unit,)
    for field in tl.static_range(2):
        if SUPER and (OFFSETS or field == 0):
            there = is_unit[:, None] & insides[2][None, :]
            at = (s // UNITS * super_stride)[:, None]
            loaded += (load_tile(pointers[6 + field] + at, there, MASKED, ""),)
        else:
            loaded += (is_unit,)
    return loaded


@triton.jit
def _inputs(
    x, unit, step, last, num_rows, num_inputs,
    G: tl.constexpr, BLOCKS: tl.constexpr, SPANS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The right operands [SPANS, GROUP, 8] of group G of a step, one for 8 rows each."""
    HALF: tl.constexpr = 16 if WIDTH == 16 else 4  # columns from a half to the next
    s = unit + step + tl.arange(0, SPANS)
    own = tl.arange(0, SPANS)[None, :, None] * (8 * GROUP) + first_columns(WIDTH)[None, None]
    start = wide(unit) * (8 * GROUP)
    operands = ()
    for block in tl.static_range(BLOCKS):
        row = tl.minimum(block * 8 + tl.arange(0, 8), num_rows - 1)[:, None, None] * num_inputs
        halves = ()
        for u in tl.static_range(GROUP // 16):
            at = (step * 8 + G) * GROUP + u * HALF
            inside = (s < last)[None, :, None] & (own + (unit * 8 * GROUP + at) < num_inputs)
            halves += (load_tile(x + (row + own) + start + at, inside, MASKED, ""),)
        operands += (right_of_groups(halves[0], halves[GROUP // 16 - 1], GROUP),)
    return operands


@triton.jit
def _of_group(
    own, less, left, xt, scale, offset,
    KIND: tl.constexpr, OFFSETS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add a group's products times its scale [SPANS, 16], and its inputs times its offset."""
    part = tl.dot(left, xt)
    if OFFSETS:
        total = tl.dot(tl.full(left.shape, 1.0, xt.dtype), xt)
        less += offset[:, :, None] * total
        if KIND == 2:  # from whose codes 8 was subtracted
            part += total * (8.0 / UNIT)
    own += (scale * UNIT)[:, :, None] * part
    return own, less


@triton.jit
def _add(
    sums, loaded, x, unit, step, last, num_rows, num_inputs,
    FORM: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr, SPANS: tl.constexpr,
    GROUP: tl.constexpr, STORED: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Add the products of a step to the sums [SPANS, 16, 8] of each tile and block of rows."""
    LOWS: tl.constexpr = FORM[0]
    WIDTH: tl.constexpr = FORM[1]
    KIND: tl.constexpr = FORM[2]
    OFFSETS: tl.constexpr = FORM[3]
    SUPER: tl.constexpr = FORM[4]
    P: tl.constexpr = FORM[5]
    PER: tl.constexpr = GROUP // WIDTH  # slices of a group
    COUNT: tl.constexpr = 8 // LOWS  # groups in a tile of words
    SCALES: tl.constexpr = 2 * LOWS + 2  # where registers of scales begin
    OTHERS: tl.constexpr = SCALES + 8 // P
    DTYPE: tl.constexpr = x.dtype.element_ty
    none = tl.zeros([SPANS, 16, 8], tl.float32)
    own, less = (), ()
    for _ in tl.static_range(TILES * BLOCKS):
        own += (none,)
        less += (none,)
    for t in tl.static_range(LOWS):
        a, b = (), ()
        for tile in tl.static_range(TILES):
            high_a, high_b = loaded[tile][2 * LOWS], loaded[tile][2 * LOWS + 1]
            if KIND >= 4:
                high_a, high_b = words_of(high_a), words_of(high_b)
            a += (tile_numbers(loaded[tile][t], high_a, t, KIND, DTYPE, OFFSETS, ASSEMBLY),)
            b += (tile_numbers(loaded[tile][LOWS + t], high_b, t, KIND, DTYPE, OFFSETS, ASSEMBLY),)
        for i in tl.static_range(COUNT):
            xs = _inputs(
                x, unit, step, last, num_rows, num_inputs,
                t * COUNT + i, BLOCKS, SPANS, GROUP, WIDTH, MASKED,
            )  # fmt: skip
            more, more_less = (), ()
            for tile in tl.static_range(TILES):
                left = left_of_group(a[tile], b[tile], i * PER, PER, WIDTH)
                bits = loaded[tile][SCALES + (t * COUNT + i) // P]
                scale = scale_in(bits, (t * COUNT + i) % P, STORED)
                offset = scale
                if OFFSETS:
                    bits = loaded[tile][OTHERS + (t * COUNT + i) // P]
                    offset = scale_in(bits, (t * COUNT + i) % P, STORED)
                for block in tl.static_range(BLOCKS):
                    y, z = _of_group(
                        *(own[tile * BLOCKS + block], less[tile * BLOCKS + block], left),
                        *(xs[block], scale, offset, KIND, OFFSETS, UNIT),
                    )
                    more += (y,)
                    more_less += (z,)
            if ASSEMBLY:  # reads sums, so that fewer groups are in registers at once
                tl.inline_asm_elementwise("", "=r,f", [more[0]], tl.int32, is_pure=False, pack=1)
            own, less = more, more_less
    added = ()
    for tile in tl.static_range(TILES):
        for block in tl.static_range(BLOCKS):
            y = own[tile * BLOCKS + block]
            z = less[tile * BLOCKS + block]
            if SUPER:
                y *= loaded[tile][OTHERS + 8 // P].to(tl.float32)[:, :, None]
                if OFFSETS:
                    z *= loaded[tile][OTHERS + 8 // P + 1].to(tl.float32)[:, :, None]
            if OFFSETS:
                y += z
            added += (sums[tile * BLOCKS + block] + y,)
    return added


@triton.jit
def _finish(
    y, n, inside, first_row, bias, residual, out, part, num_rows, num_outputs,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, MODE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store the results [16, 8] of weight rows n, or [8, 8] gates times what is below them."""
    m = first_row + tl.arange(0, 8)
    if BIAS:
        if part == 0:
            y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if MODE == 2:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, 8, 8]), (1, 2, 0)))
        own, _ = tl.split(tl.trans(tl.reshape(n, [2, 8])))
        y = gated(gate, up, ACTIVATION)
        at = m[None, :] * num_outputs + own[:, None]
        there = (own < num_outputs)[:, None] & (m < num_rows)[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=there)
    else:
        at = m[None, :] * num_outputs + n[:, None]
        there = inside[:, None] & (m < num_rows)[None, :]
        if RESIDUAL:
            y += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        size = num_rows * num_outputs
        tl.store(out + part * size + at, y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["split_k", "num_rows"])
def _few_rows_kernel(
    words,  # [N, W / 2] int32, pairs of words; gated: [2 N, W / 2]
    high,  # [N, W2 / 2] int32, of two planes
    x,  # [M, K]
    scales,  # [registers, N] int32, 4 bytes of neighbouring groups of a row
    zeros,  # offsets, of the same shape
    super_scales,  # [ceil(K / 256), N], if SUPER
    super_offsets,
    bias,  # [N] or [2 N]
    residual,  # [M, N]
    out,  # [M, N], or [split_k, M, N] float32
    num_rows,  # M
    num_outputs,  # N
    num_inputs,  # K
    num_words,  # W
    num_high,  # W2
    num_groups,  # registers of a row
    stride,  # of `scales` and `offsets`
    super_stride,
    part_units,  # of a part, a multiple of SPANS
    num_units,
    split_k,  # number of parts
    BLOCKS: tl.constexpr,  # of 8 rows
    TILES: tl.constexpr,  # of 16 weight rows, in a program; gated: of 8 of gate and 8 of up
    SPANS: tl.constexpr,  # the warps
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,  # words of a tile
    LOWS: tl.constexpr,  # tiles of a unit
    KIND: tl.constexpr,
    STORED: tl.constexpr,
    UNIT: tl.constexpr,  # what the products are multiplied by
    OFFSETS: tl.constexpr,
    SUPER: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,  # no weight row and no column is beyond the end
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    HEIGHT: tl.constexpr = 8 if MODE == 2 else 16
    P: tl.constexpr = 4 if STORED < 2 else 2 if STORED < 4 else 1
    FORM: tl.constexpr = (LOWS, WIDTH, KIND, OFFSETS, SUPER, P, 256 // (8 * GROUP))
    part = tl.program_id(0) % split_k
    start = tl.program_id(0) // split_k * TILES * HEIGHT
    first = part * part_units
    last = tl.minimum(first + part_units, num_units)
    pointers, insides, n = (), (), ()
    for tile in tl.static_range(TILES):
        rows, low, upper, inside = rows_of_tile(start + tile * HEIGHT, num_outputs, MODE)
        n += (rows,)
        insides += (inside,)
        none = tl.zeros([SPANS, 1], tl.int32) + rows[None, :]
        pointers += (
            (
                lanes_of(words, low, num_words // 2, LOWS * WIDTH // 2, SPANS, WIDTH // 2),
                lanes_of(words, upper, num_words // 2, LOWS * WIDTH // 2, SPANS, WIDTH // 2),
                lanes_of(high, low, num_high // 2, WIDTH // 2, SPANS, WIDTH // 2),
                lanes_of(high, upper, num_high // 2, WIDTH // 2, SPANS, WIDTH // 2),
                scales + none,
                zeros + none,
                super_scales + none,
                super_offsets + none,
            ),
        )
    sizes = num_words, num_groups, stride, super_stride
    loaded = ()
    for tile in tl.static_range(TILES):
        loaded += (_load(pointers[tile], insides[tile], sizes, first, 0, last, FORM, not EVEN),)
    wait_for_inputs(PDL)
    sums = ()
    for _ in tl.static_range(TILES * BLOCKS):
        sums += (tl.zeros([SPANS, 16, 8], tl.float32),)
    for unit in range(first, last, SPANS):
        sums = _add(
            sums, loaded, x, unit, 0, last, num_rows, num_inputs,
            FORM, TILES, BLOCKS, SPANS, GROUP, STORED, UNIT, not EVEN, ASSEMBLY,
        )  # fmt: skip
        more = ()
        for tile in tl.static_range(TILES):
            more += (
                _load(pointers[tile], insides[tile], sizes, unit + SPANS, 0, last, FORM, True),
            )
        loaded = more
    for tile in tl.static_range(TILES):
        for block in tl.static_range(BLOCKS):
            _finish(
                tl.sum(sums[tile * BLOCKS + block], 0), n[tile], insides[tile][2], block * 8,
                bias, residual, out, part, num_rows, num_outputs,
                BIAS, RESIDUAL, MODE, ACTIVATION,
            )  # fmt: skip


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Direct,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.packed.linear`, whose operations are the modes; x [M, K], of up to 16 rows, has
    the weight's order of columns."""
    num_rows, num_inputs = x.shape
    assert num_rows <= 16 and x.is_contiguous() and fits_few_rows(weight)
    num_outputs = weight.shape[0] // (2 if mode == GATE_UP else 1)
    height = (8 if mode == GATE_UP else 16) * choice.tiles
    columns = 8 * weight.group  # of a unit
    num_units = triton.cdiv(num_inputs, columns)
    step = choice.num_warps
    split_k, part_units = parts_of(num_units, choice.split_k if mode == PARTS else 1, step)
    out = empty_output(x, num_outputs, mode, split_k)
    even = num_outputs % height == 0 and num_units % step == 0 and num_inputs % columns == 0
    high = weight.words if weight.high is None else weight.high
    arguments = product_arguments(x, weight, mode, bias, activation, None, residual)
    _few_rows_kernel[(triton.cdiv(num_outputs, height) * split_k,)](
        weight.words.view(torch.int32),
        high.view(torch.int32),
        x,
        **taken(_few_rows_kernel, arguments | scale_arguments(weight, x)),
        out=out,
        num_high=high.shape[1],
        super_stride=0 if weight.super_scales is None else weight.super_scales.stride(0),
        part_units=part_units,
        num_units=num_units,
        split_k=split_k,
        BLOCKS=1 if num_rows <= 8 else 2,
        TILES=choice.tiles,
        SPANS=choice.num_warps,
        WIDTH=weight.slice_width,
        LOWS=columns // (weight.slice_width * slices_of_word(weight)),
        UNIT=unit_of_numbers(weight, x),
        OFFSETS=weight.offsets is not None,
        SUPER=weight.super_scales is not None,
        EVEN=even,
        num_warps=choice.num_warps,
        num_stages=1,
        **pdl_options(x),
    )
    return out


hash_functions(globals())
