"""What the consumer of `hopper_row` does in a step: load words, turn them into numbers, multiply.

SUMS is the layout of sums [SPANS, 16, 8]; each warp has a span of them. In the operands' layout a
lane has 16 bytes of a row: eight words, and eight numbers of the input for them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....launch import hash_functions
from ....quant.triton import packed_codes
from .row_inputs import input_of

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
def _excess_of(x, GROUPS: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr):
    """The product of a step's input with the zero of "int4", negative, for even slices."""
    excess = gl.zeros([SPANS, HEIGHT, 8], gl.float32, layout=SUMS)
    if GROUPS > 0:
        excess = mma_v2(minus_eight(SPANS, gl.DotOperandLayout(0, SUMS, 8)), x, excess)
    return excess


@gluon.jit
def _add_step(sums, words, scales, x, even, GROUPS: gl.constexpr):
    """Add the products of a step to the sums of each slice."""
    added = ()
    if GROUPS > 0:
        tiles = masked_4(words)
        odd = even * 16.0
        for i in gl.static_range(4):
            part = mma_v2(tiles[i], x, odd if i % 2 else even)
            scale = scales[i * GROUPS // 4].to(gl.float32)
            added += (sums[i] + part * scale[:, :, None],)
    else:
        tiles = masked_8(words)
        for i in gl.static_range(2):
            added += (mma_v2(tiles[i], x, sums[i]),)
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
def multiply_tiles(
    inputs, partials, count, w_tiles, s_tiles, full, empty, fill, total, words, scales,
    STEPS: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr,
    FACTORS: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    """Store the sums of each span of `count` tiles of a product in `partials`.

    `inputs` is what `stage_input` returned; `words` and `scales` are those of step `fill` of
    `total`. The next ones are loaded while these are multiplied. Returns the same for the next
    step. The inputs of up to HELD steps stay in registers.
    """
    none = gl.zeros([SPANS, HEIGHT, 8], gl.float32, layout=SUMS)
    first = input_of(inputs, 0, SLICES, SUMS, SPANS)
    xs = (first,)
    excesses = (_excess_of(first, GROUPS, SUMS, SPANS),)
    if STEPS <= HELD:
        for step in gl.static_range(1, STEPS):
            xs += (input_of(inputs, step, SLICES, SUMS, SPANS),)
            excesses += (_excess_of(xs[step], GROUPS, SUMS, SPANS),)
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
                even = excesses[step]
                sums = _add_step(sums, now, now_scales, xs[step], even, GROUPS)
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
                x_next = input_of(inputs, after, SLICES, SUMS, SPANS)
                even = _excess_of(x_now, GROUPS, SUMS, SPANS)
                sums = _add_step(sums, now, now_scales, x_now, even, GROUPS)
                x_now = x_next
        partials.index(turn).store(_total_of(sums, SLICES, FACTORS, SUMS))
    return fill, words, scales


hash_functions(globals())
