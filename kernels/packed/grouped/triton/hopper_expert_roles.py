"""The roles of warps in the experts of "mxfp4" on Hopper; see `hopper_experts`.

The arguments that the roles share: w_tiles [STAGES * CONSUMERS, 64, 64] int16 and s_tiles [STAGES *
CONSUMERS, 1, 128] int32 are words and factors of 64 rows and 256 columns; x_pieces [X_STAGES * 4 *
BOXES, 16, 64] are 16 token rows and a quarter of these columns. Each stage has barriers that tell
when it is full and when it is empty. `plan` [3, E] int32 holds the first row of each expert, the
number of its rows, and the running sum of its blocks of BLOCK_M rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .... import launch
from ....launch import hash_functions
from ....quant import tiled
from ....quant.triton.packed_codes import FP4_TIMES
from .hopper_expert_stores import ROWS, store_inner, store_parts

wait_for_inputs = gluon.jit(launch.wait_for_inputs.fn)
FACTOR_DIVISOR = gl.constexpr(tiled.FACTOR_DIVISOR)

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COLUMNS = gl.constexpr(256)  # of a step
WORD_BYTES = gl.constexpr(64 * 128 + 512)  # of a consumer in a stage, with factors
# How a consumer holds the words of a stage: a thread has 16 neighbours of two rows, which are the
# codes of two groups of 32 columns each.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
_SPANS = gl.constexpr(  # the same as [rows, spans, words of a span]
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 16],
    )
)


@gluon.jit
def _find_tile(plan, tile, num_experts, N_TILES: gl.constexpr, BLOCK_M: gl.constexpr,
               BLOCK_E: gl.constexpr):  # fmt: skip
    """Find a tile: its expert, block of weight rows, first row of x and number of rows.

    Tiles of the same weights follow each other, so that they read these from the cache.
    """
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_E // 32], [32], [gl.num_warps()], [0])
    each = gl.arange(0, BLOCK_E, layout=layout)
    upto = gl.load(plan + 2 * num_experts + each, mask=each < num_experts, other=1 << 20)
    done = upto * N_TILES <= tile
    expert = gl.sum(gl.cast(done, gl.int32), 0)
    passed = gl.max(gl.where(done, upto, 0), 0)
    start = gl.load(plan + expert)
    count = gl.load(plan + num_experts + expert)
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    inside = tile - passed * N_TILES
    first = inside % blocks * BLOCK_M
    return expert, inside // blocks, start + first, gl.minimum(count - first, BLOCK_M)


@gluon.jit
def _count_tiles(plan, num_experts, N_TILES: gl.constexpr):
    return gl.load(plan + (3 * num_experts - 1)) * N_TILES


@gluon.jit
def bring_words(
    words, scales, plan, w_tiles, s_tiles, w_full, w_empty, num_experts, N,
    N_TILES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_E: gl.constexpr, STEPS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy the words and factors of each tile. Those of `down` need not wait for `gate_up`: the
    plan was complete before that began."""
    HALVES: gl.constexpr = 2 if GATED else 1
    if GATED:
        wait_for_inputs(PDL)
    fill = 0  # stages copied
    for tile in range(gl.program_id(0), _count_tiles(plan, num_experts, N_TILES),
                      gl.num_programs(0)):  # fmt: skip
        expert, block, _, _ = _find_tile(plan, tile, num_experts, N_TILES, BLOCK_M, BLOCK_E)
        row = expert * (HALVES * N) + block * (CONSUMERS * ROWS)
        for step in range(STEPS):
            for half in gl.static_range(HALVES):
                slot, phase = fill % STAGES, (fill // STAGES) & 1
                full = w_full.index(slot)
                mbarrier.wait(w_empty.index(slot), phase ^ 1)
                mbarrier.expect(full, CONSUMERS * WORD_BYTES)
                for c in gl.static_range(CONSUMERS):
                    at, place = row + half * N + c * ROWS, slot * CONSUMERS + c
                    tma.async_copy_global_to_shared(
                        words, [at, step * 64], full, w_tiles.index(place)
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        scales, [at // ROWS * STEPS + step, 0], full, s_tiles.index(place)
                    )  # fmt: skip
                fill += 1
    if not GATED:
        wait_for_inputs(PDL)


@gluon.jit
def bring_rows(
    x, plan, x_pieces, x_full, x_empty, num_experts,
    N_TILES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_E: gl.constexpr, STEPS: gl.constexpr,
    X_STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy the rows of x of each tile, in boxes of 16."""
    BOXES: gl.constexpr = BLOCK_M // 16
    wait_for_inputs(PDL)
    fill = 0
    for tile in range(gl.program_id(0), _count_tiles(plan, num_experts, N_TILES),
                      gl.num_programs(0)):  # fmt: skip
        _, _, first, rows = _find_tile(plan, tile, num_experts, N_TILES, BLOCK_M, BLOCK_E)
        boxes = (rows + 15) // 16
        height = 2  # in boxes, of the narrowest form that they fit
        if rows <= 16:
            height = 1
        elif rows > 32:
            height = BOXES
        for step in range(STEPS):
            slot, phase = fill % X_STAGES, (fill // X_STAGES) & 1
            full = x_full.index(slot)
            mbarrier.wait(x_empty.index(slot), phase ^ 1)
            for count in gl.static_range(1, BOXES + 1):
                mbarrier.expect(full, count * (16 * COLUMNS * 2), pred=boxes == count)
            for box in gl.static_range(BOXES):
                for panel in gl.static_range(4):
                    tma.async_copy_global_to_shared(
                        x,
                        [first + box * 16, step * COLUMNS + panel * 64],
                        full,
                        x_pieces.index(slot * 4 * BOXES + panel * height + box),
                        pred=box < boxes,
                    )
            fill += 1


@gluon.jit
def _factors(scales, PLACE: gl.constexpr):
    """The factors [64, 64] of the words, of one of both groups of each thread and row."""
    low = (((scales >> (8 * PLACE)) & 255) << 7).to(gl.int16)
    high = (((scales >> (16 + 8 * PLACE)) & 255) << 7).to(gl.int16)
    both = gl.join(low, high).reshape([4, 8, 4, 2]).permute((0, 3, 1, 2)).reshape([64, 4])
    both = gl.convert_layout(both, gl.SliceLayout(2, _SPANS)).to(gl.bfloat16, bitcast=True)
    wide, _ = gl.broadcast(gl.expand_dims(both, 2), gl.zeros([64, 4, 16], gl.bfloat16, _SPANS))
    return gl.convert_layout(wide.reshape([64, 64]), _WORDS, assert_trivial=True)


@gluon.jit
def _operand(tiles, OPERAND: gl.constexpr):
    """The numbers of four slices as a thread has them, as the left operand [64, 256]; this moves
    nothing. An instruction of the tensor cores takes four neighbours from each thread."""
    even, odd = gl.join(tiles[0], tiles[2]), gl.join(tiles[1], tiles[3])
    tile = gl.join(even, odd).permute((0, 2, 3, 1)).reshape([64, 4, 4, 4, 2, 2])
    tile = tile.permute((0, 1, 3, 4, 2, 5)).reshape([64, 256])
    return gl.convert_layout(tile, OPERAND, assert_trivial=True)


@gluon.jit
def _numbers(words, scales):
    """The numbers of four slices of a stage's words, divided by FACTOR_DIVISOR."""
    return gl.inline_asm_elementwise(
        FP4_TIMES,
        "=r,=r,=r,=r,r,r,r",
        [words, _factors(scales, 0), _factors(scales, 1)],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=2,
    )


@gluon.jit
def _add_stage(acc, words, scales, x_tile, OPERAND: gl.constexpr):
    """Widen the words of a stage in registers, and start their products."""
    numbers = _operand(_numbers(words, scales), OPERAND)
    return warpgroup_mma(numbers, x_tile.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _take(w_tiles, s_tiles, w_full, w_empty, fill, PART: gl.constexpr, CONSUMERS: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Load a consumer's words and factors of stage `fill`, and release its memory."""
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    slot, phase = fill % STAGES, (fill // STAGES) & 1
    mbarrier.wait(w_full.index(slot), phase)
    words = w_tiles.index(slot * CONSUMERS + PART).load(_WORDS)
    scales = s_tiles.index(slot * CONSUMERS + PART).load(flat)
    mbarrier.arrive(w_empty.index(slot), count=1)
    return words, scales


@gluon.jit
def _sums(
    w_tiles, s_tiles, x_pieces, w_full, w_empty, x_full, x_empty, fill, x_fill,
    PART: gl.constexpr, TOKENS: gl.constexpr, BOXES: gl.constexpr, STEPS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The products of a consumer's weight rows with TOKENS rows of x, [64, TOKENS]; gated: of gate
    and of up. The words of a stage are loaded while the products of the stage before are computed.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    HALVES: gl.constexpr = 2 if GATED else 1
    # Other forms lack the registers.
    AHEAD: gl.constexpr = CONSUMERS == 2 and BOXES <= 2
    EACH: gl.constexpr = BOXES * 16 // TOKENS
    x_tiles = x_pieces._reinterpret(
        gl.bfloat16, [X_STAGES * EACH, TOKENS, COLUMNS], SWIZZLED
    )  # fmt: skip
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout=LAYOUT)
    last = gl.zeros([ROWS, TOKENS], gl.float32, layout=LAYOUT)
    words, scales = _take(w_tiles, s_tiles, w_full, w_empty, fill, PART, CONSUMERS, STAGES)
    for step in range(STEPS):
        x_at, w_at = x_fill + step, fill + step * HALVES
        x_slot, x_phase = x_at % X_STAGES, (x_at // X_STAGES) & 1
        mbarrier.wait(x_full.index(x_slot), x_phase)
        x_tile = x_tiles.index(x_slot * EACH)
        if GATED:
            flying = _add_stage(acc, words, scales, x_tile, OPERAND)
            words, scales = _take(
                w_tiles, s_tiles, w_full, w_empty, w_at + 1, PART, CONSUMERS, STAGES
            )  # fmt: skip
        if GATED and AHEAD:  # widen while products are in flight
            numbers = _operand(_numbers(words, scales), OPERAND)
            # This barrier has passed already. Without the branch the assembler would widen the
            # words only after the wait for products.
            mbarrier.wait(x_full.index(x_slot), x_phase)
            acc = warpgroup_mma_wait(0, deps=[flying])
            flying = warpgroup_mma(numbers, x_tile.permute((1, 0)), last, is_async=True)
        else:
            if GATED:
                acc = warpgroup_mma_wait(0, deps=[flying])
            flying = _add_stage(last, words, scales, x_tile, OPERAND)
        if step + 1 < STEPS:
            words, scales = _take(
                w_tiles, s_tiles, w_full, w_empty, w_at + HALVES, PART, CONSUMERS, STAGES
            )  # fmt: skip
        last = warpgroup_mma_wait(0, deps=[flying])
        mbarrier.arrive(x_empty.index(x_slot), count=1)
    return acc * FACTOR_DIVISOR, last * FACTOR_DIVISOR


@gluon.jit
def _compute_tile(
    bias, pairs, pair_weights, out, w_tiles, s_tiles, x_pieces, w_full, w_empty, x_full, x_empty,
    fill, x_fill, expert, start, first, rows, N, num_rows,
    PART: gl.constexpr, TOKENS: gl.constexpr, BOXES: gl.constexpr, STEPS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, TOP_K: gl.constexpr, CLAMPED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    acc, last = _sums(
        w_tiles, s_tiles, x_pieces, w_full, w_empty, x_full, x_empty, fill, x_fill,
        PART, TOKENS, BOXES, STEPS, CONSUMERS, STAGES, X_STAGES, GATED,
    )  # fmt: skip
    if GATED:
        store_inner(
            acc, last, bias, out, expert, start, first, rows, N,
            TOKENS, BIAS, CLAMPED, ALPHA, LIMIT, WIDTH,
        )  # fmt: skip
    else:
        store_parts(
            last, bias, pairs, pair_weights, out, expert, start, first, rows, N, num_rows,
            TOKENS, BIAS, TOP_K,
        )  # fmt: skip


@gluon.jit
def multiply(
    PART: gl.constexpr, plan, bias, pairs, pair_weights, out, w_tiles, s_tiles, x_pieces, w_full,
    w_empty, x_full, x_empty, num_experts, N, num_rows,
    N_TILES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_E: gl.constexpr, STEPS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, TOP_K: gl.constexpr, CLAMPED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, WIDTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A consumer: computes 64 weight rows of each tile, in the narrowest form that its rows of x
    fit."""
    HALVES: gl.constexpr = 2 if GATED else 1
    BOXES: gl.constexpr = BLOCK_M // 16
    wait_for_inputs(PDL)
    fill = 0  # stages of words that were taken
    x_fill = 0
    for tile in range(gl.program_id(0), _count_tiles(plan, num_experts, N_TILES),
                      gl.num_programs(0)):  # fmt: skip
        expert, block, first, rows = _find_tile(
            plan, tile, num_experts, N_TILES, BLOCK_M, BLOCK_E
        )  # fmt: skip
        start = block * (CONSUMERS * ROWS) + PART * ROWS
        if rows <= 16:
            _compute_tile(
                bias, pairs, pair_weights, out, w_tiles, s_tiles, x_pieces, w_full, w_empty, x_full,
                x_empty, fill, x_fill, expert, start, first, rows, N, num_rows, PART, 16,
                BOXES, STEPS, CONSUMERS, STAGES, X_STAGES, GATED, BIAS, TOP_K, CLAMPED, ALPHA,
                LIMIT, WIDTH,
            )  # fmt: skip
        elif rows <= 32 or BLOCK_M == 32:
            if BLOCK_M >= 32:
                _compute_tile(
                    bias, pairs, pair_weights, out, w_tiles, s_tiles, x_pieces, w_full, w_empty,
                    x_full, x_empty, fill, x_fill, expert, start, first, rows, N, num_rows,
                    PART, 32, BOXES, STEPS, CONSUMERS, STAGES, X_STAGES, GATED, BIAS, TOP_K,
                    CLAMPED, ALPHA, LIMIT, WIDTH,
                )  # fmt: skip
        else:
            if BLOCK_M >= 64:
                _compute_tile(
                    bias, pairs, pair_weights, out, w_tiles, s_tiles, x_pieces, w_full, w_empty,
                    x_full, x_empty, fill, x_fill, expert, start, first, rows, N, num_rows,
                    PART, 64, BOXES, STEPS, CONSUMERS, STAGES, X_STAGES, GATED, BIAS, TOP_K,
                    CLAMPED, ALPHA, LIMIT, WIDTH,
                )  # fmt: skip
        fill += STEPS * HALVES
        x_fill += STEPS


hash_functions(globals())
