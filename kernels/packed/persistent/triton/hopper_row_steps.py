"""What the consumer of `hopper_row` does in a step: load words, turn them into numbers, multiply.

SUMS is the layout of sums [SPANS, 16, 8]; each warp has a span of them. In the operands' layout a
lane has 16 bytes of a row: eight words, and eight numbers of the input for them. `row_inputs`
explains the columns of the input's operands.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....launch import hash_functions
from ....quant.triton import packed_codes
from .row_inputs import operands_of, slices_of_operand

HEIGHT = gl.constexpr(16)  # weight rows of a tile; 8 of gate and 8 of up
MASKED_4 = gl.constexpr(packed_codes.MASKED_4.value)
MASKED_8 = gl.constexpr(packed_codes.MASKED_FP8_BF16.value)


@gluon.jit
def take(
    w_tiles, s_tiles, full, empty, fill, total,
    GROUPS: gl.constexpr, SUMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the words and the scales of a step, and release its memory; after the last one, any."""
    slot, phase = fill % STAGES, (fill // STAGES) & 1
    mbarrier.wait(full.index(slot), phase, pred=fill < total)
    words = w_tiles.index(slot).load(gl.DotOperandLayout(0, SUMS, 8))
    scales = ()
    for g in gl.static_range(GROUPS):
        own = s_tiles.index(slot).slice(g * HEIGHT, HEIGHT, 1)
        scales += (own.load(gl.SliceLayout(2, SUMS)),)
    mbarrier.arrive(empty.index(slot), count=1, pred=fill < total)
    return words, scales


@gluon.jit
def masked_4(words):
    """The codes of the four slices of "int4" as tiny floats; see `packed_codes.scaled_numbers`."""
    return gl.inline_asm_elementwise(
        MASKED_4,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def masked_8(words):
    """The numbers of both slices of "fp8" as tiny floats."""
    return gl.inline_asm_elementwise(
        MASKED_8, "=r,=r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def minus_eight(SPANS: gl.constexpr, LEFT: gl.constexpr):
    """The zero of "int4", negative, as a tile of such tiny floats of an even slice."""
    bits = gl.full([SPANS, HEIGHT, 64], -0x7FF8, gl.int16, layout=LEFT)
    return bits.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _excesses_of(
    xs, OPERANDS: gl.constexpr, GROUPS: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr
):  # fmt: skip
    """The products of a step's operands with the zero of "int4", negative, for even slices."""
    found = ()
    for i in gl.static_range(OPERANDS):
        excess = gl.zeros([SPANS, HEIGHT, 8], gl.float32, layout=SUMS)
        if GROUPS > 0:
            excess = mma_v2(minus_eight(SPANS, gl.DotOperandLayout(0, SUMS, 8)), xs[i], excess)
        found += (excess,)
    return found


@gluon.jit
def _add_step(
    sums, words, scales, xs, evens,
    OPERANDS: gl.constexpr, GROUPS: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """Add the products of a step to the sums of each slice."""
    added = ()
    if GROUPS > 0:
        tiles = masked_4(words)
        odds = ()
        for i in gl.static_range(OPERANDS):
            odds += (evens[i] * 16.0,)
        for i in gl.static_range(4):
            excess = odds[i // PER] if i % 2 else evens[i // PER]
            part = mma_v2(tiles[i], xs[i // PER], excess)
            scale = scales[i * GROUPS // 4].to(gl.float32)
            added += (sums[i] + part * scale[:, :, None],)
    else:
        tiles = masked_8(words)
        for i in gl.static_range(2):
            added += (mma_v2(tiles[i], xs[i // PER], sums[i]),)
    return added


@gluon.jit
def _total_of(sums, SLICES: gl.constexpr, FACTORS: gl.constexpr, SUMS: gl.constexpr):
    """The sums [SPANS, HEIGHT] of all slices: column i of the i-th."""
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
    total = gl.where(column == 0, sums[0] * FACTORS[0], 0.0)
    for i in gl.static_range(1, SLICES):
        total += gl.where(column == i, sums[i] * FACTORS[i], 0.0)
    return gl.sum(total, 2)


@gluon.jit
def _totals_of(
    sums, SLICES: gl.constexpr, FACTORS: gl.constexpr, SUMS: gl.constexpr,
    SPANS: gl.constexpr, ROWS: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """The same of each row, [SPANS, HEIGHT, ROWS], added in the same order."""
    COPIES: gl.constexpr = 8 // (ROWS * PER)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
    total = 0.0
    for i in gl.static_range(0, SLICES, PER):
        own = sums[i] * FACTORS[i]
        for j in gl.static_range(1, PER):
            own = gl.where(column % PER == j, sums[i + j] * FACTORS[i + j], own)
        if COPIES > 1:
            own = gl.where(column < ROWS * PER, own, 0.0)
            own = gl.reshape(own, [SPANS, HEIGHT, COPIES, ROWS, PER])
            own = gl.sum(gl.sum(own, 4), 2)
        else:
            own = gl.sum(gl.reshape(own, [SPANS, HEIGHT, ROWS, PER]), 3)
        total = own if i == 0 else total + own
    return total


@gluon.jit
def multiply_tiles(
    inputs, partials, count, w_tiles, s_tiles, full, empty, fill, total, words, scales,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr,
    FACTORS: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Store the sums of each span of `count` tiles of a product in `partials`.

    `inputs` is what `stage_input` or `stage_rows` returned; `words` and `scales` are those of step
    `fill` of `total`. The next ones are loaded while these are multiplied. Returns the same for the
    next step. The inputs of up to HELD steps stay in registers.
    """
    PER: gl.constexpr = slices_of_operand(SLICES, ROWS)
    OPERANDS: gl.constexpr = SLICES // PER
    none = gl.zeros([SPANS, HEIGHT, 8], gl.float32, layout=SUMS)
    first = operands_of(inputs, 0, SLICES, ROWS, SUMS, SPANS)
    xs = (first,)
    excesses = (_excesses_of(first, OPERANDS, GROUPS, SUMS, SPANS),)
    if STEPS <= HELD:
        for step in gl.static_range(1, STEPS):
            xs += (operands_of(inputs, step, SLICES, ROWS, SUMS, SPANS),)
            excesses += (_excesses_of(xs[step], OPERANDS, GROUPS, SUMS, SPANS),)
    for turn in range(count):
        sums = none, none, none, none
        if GROUPS == 0:
            sums = none, none
        if STEPS <= HELD:
            for step in gl.static_range(STEPS):
                now, now_scales = words, scales
                fill += 1
                words, scales = take(
                    w_tiles, s_tiles, full, empty, fill, total,
                    GROUPS, SUMS, STAGES,
                )  # fmt: skip
                evens = excesses[step]
                sums = _add_step(sums, now, now_scales, xs[step], evens, OPERANDS, GROUPS, PER)
        else:
            x_now = first
            for step in range(STEPS):
                now, now_scales = words, scales
                fill += 1
                words, scales = take(
                    w_tiles, s_tiles, full, empty, fill, total,
                    GROUPS, SUMS, STAGES,
                )  # fmt: skip
                after = (step + 1) % STEPS  # after the last one, any
                x_next = operands_of(inputs, after, SLICES, ROWS, SUMS, SPANS)
                evens = _excesses_of(x_now, OPERANDS, GROUPS, SUMS, SPANS)
                sums = _add_step(sums, now, now_scales, x_now, evens, OPERANDS, GROUPS, PER)
                x_now = x_next
        if ROWS == 1:
            partials.index(turn).store(_total_of(sums, SLICES, FACTORS, SUMS))
        else:
            partials.index(turn).store(
                _totals_of(sums, SLICES, FACTORS, SUMS, SPANS, ROWS, PER)
            )  # fmt: skip
    return fill, words, scales


hash_functions(globals())
