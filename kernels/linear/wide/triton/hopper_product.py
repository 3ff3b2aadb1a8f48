"""Matrix products of many rows for Hopper GPUs, in Gluon: warps with roles of their own.

One warp, the producer, copies tiles of rows and of weights into a ring in shared memory by the
tensor memory accelerator. Each consumer, a group of four warps, multiplies 64 of a tile's rows with
all of its weights and keeps the sums in registers. As many programs as the GPU has multiprocessors
take tiles in turn, and a producer fills the ring for the next tile while the consumers write the
last. A tile may consist of a gate and an up projection of the same outputs, so that the consumer
that has both applies the activation, and only the product is written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....device import num_processors
from ....launch import hash_functions
from ...linear_choice import Wide

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # rows of a consumer
BLOCK_K = gl.constexpr(64)  # columns of a copy: 128 bytes, the widest that is stored swizzled
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LOG2E = gl.constexpr(1.4426950408889634)
_REGISTERS = 168  # a thread's on average, of 384 threads; consumers get more, the producer fewer
_CONSUMER, _PRODUCER = 232, 40  # registers of a thread


@gluon.jit
def _find_tile(tile, row_blocks, column_blocks, group):
    """The block of rows and the block of outputs of a tile.

    Tiles go down the blocks of rows of a group before they go on to the next block of outputs, so
    that `group` blocks of rows share the weights in the cache.
    """
    size = group * column_blocks
    first = tile // size * group
    height = gl.minimum(row_blocks - first, group)
    within = tile % size
    return first + within % height, within // height


@gluon.jit
def _fill_tile(
    x_source, w_source, x_tiles, w_pieces, full, empty, fill, row, column, steps, up_from,
    N: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Copy the rows of a tile and its N weights, in pieces, step by step."""
    IN_TURN: gl.constexpr = N // PIECE // 2 if GATED else N // PIECE  # then come those of up
    for step in range(steps):
        slot, phase = fill % STAGES, (fill // STAGES) & 1
        at, is_full = step * BLOCK_K, full.index(slot)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(is_full, (CONSUMERS * ROWS + N) * BLOCK_K * 2)
        for part in gl.static_range(CONSUMERS):
            place = x_tiles.index(slot * CONSUMERS + part)
            tma.async_copy_global_to_shared(x_source, [row + part * ROWS, at], is_full, place)
        for part in gl.static_range(N // PIECE):
            place = w_pieces.index(slot * PIECES + part)
            first = column + part % IN_TURN * PIECE + part // IN_TURN * up_from
            tma.async_copy_global_to_shared(w_source, [first, at], is_full, place)
        fill += 1
    return fill


@gluon.jit
def _produce(
    x_source, w_source, x_tiles, w_pieces, full, empty, row_blocks, column_blocks, steps, group,
    whole, halves, up_from, BLOCK_N: gl.constexpr, PIECE: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The producer: fills the ring with the rows and weights of each tile."""
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PIECES: gl.constexpr = BLOCK_N // PIECE
    program = gl.program_id(0)
    fill = 0  # stages filled
    for tile in range(program, whole, gl.num_programs(0)):
        row_block, column_block = _find_tile(tile, row_blocks, column_blocks, group)
        fill = _fill_tile(
            x_source, w_source, x_tiles, w_pieces, full, empty, fill,
            row_block * CONSUMERS * ROWS, column_block * WIDTH, steps, up_from, BLOCK_N, PIECE,
            PIECES, STAGES, GATED,
        )  # fmt: skip
    for tile in range(program, halves, gl.num_programs(0)):
        row_block, column_block = _find_tile(whole + tile // 2, row_blocks, column_blocks, group)
        fill = _fill_tile(
            x_source, w_source, x_tiles, w_pieces, full, empty, fill,
            row_block * CONSUMERS * ROWS, column_block * WIDTH + tile % 2 * (WIDTH // 2), steps,
            up_from, BLOCK_N // 2, PIECE, PIECES, STAGES, GATED,
        )  # fmt: skip


@gluon.jit
def _activate(acc, N: gl.constexpr, GELU: gl.constexpr):
    """act(gate) * up of [ROWS, N] sums, the gates in the first half of the columns."""
    halves = gl.reshape(acc, [ROWS, 2, N // 2])
    gate, up = gl.split(gl.permute(halves, (0, 2, 1)))
    if GELU:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z, which loses no digits for negative z
        inner = 2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    # The square of this root takes fewer instructions than a division.
    root = gl.rsqrt(1.0 + gl.exp2(-LOG2E * inner))
    return gate * up * (root * root)


@gluon.constexpr_function
def _sums_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def _stored_layout(width):
    """A thread has 8 numbers of a row, and four threads follow each other, so that no thread needs
    one from another group of four. The sums of a product lie so, too."""
    columns = [[0, 32 << i] for i in range((width // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *columns],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, width],
    )


@gluon.jit
def _compute_tile(
    PART: gl.constexpr, out, x_tiles, w_tiles, full, empty, begun, acc, fill, turn, row, column,
    num_rows, num_columns, steps, N: gl.constexpr, PITCH: gl.constexpr, STAGES: gl.constexpr,
    LAG: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows with N weights of each stage, and write what the sums become."""
    WIDTH: gl.constexpr = N // 2 if GATED else N
    STORED: gl.constexpr = _stored_layout(WIDTH)
    if LAG > 0 and PART == 1:
        mbarrier.wait(begun, turn & 1)
    for step in range(steps):
        slot, phase = fill % STAGES, (fill // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        acc = warpgroup_mma(
            x_tiles.index(slot * CONSUMERS + PART), w_tiles.index(slot * PITCH).permute((1, 0)),
            acc, use_acc=step > 0, is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The products of the step before have ended, those of this step are in flight.
        if step > 0:
            mbarrier.arrive(empty.index((fill - 1) % STAGES), count=1)
        if LAG > 0 and PART == 0 and step == LAG - 1:
            mbarrier.arrive(begun, count=1)
        fill += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((fill - 1) % STAGES), count=1)

    result = acc
    if GATED:
        result = _activate(acc, N, GELU)
    result = gl.convert_layout(result.to(out.dtype.element_ty), STORED)
    rows = row + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORED))
    place = out + (gl.cast(rows, gl.int64) * num_columns)[:, None] + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    gl.store(place, result, mask=inside)
    return acc, fill


@gluon.jit
def _consume(
    PART: gl.constexpr, out, x_tiles, w_tiles, w_halves, full, empty, begun, num_rows, num_columns,
    row_blocks, column_blocks, steps, group, whole, halves, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, LAG: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """A consumer: computes ROWS rows of each tile."""
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    program = gl.program_id(0)
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=_sums_layout(BLOCK_N))
    fill, turn = 0, 0  # stages multiplied, tiles computed
    for tile in range(program, whole, gl.num_programs(0)):
        row_block, column_block = _find_tile(tile, row_blocks, column_blocks, group)
        acc, fill = _compute_tile(
            PART, out, x_tiles, w_tiles, full, empty, begun, acc, fill, turn,
            row_block * CONSUMERS * ROWS, column_block * WIDTH, num_rows, num_columns, steps,
            BLOCK_N, 1, STAGES, LAG, GATED, GELU,
        )  # fmt: skip
        turn += 1
    half = gl.zeros([ROWS, BLOCK_N // 2], gl.float32, layout=_sums_layout(BLOCK_N // 2))
    for tile in range(program, halves, gl.num_programs(0)):
        row_block, column_block = _find_tile(whole + tile // 2, row_blocks, column_blocks, group)
        half, fill = _compute_tile(
            PART, out, x_tiles, w_halves, full, empty, begun, half, fill, turn,
            row_block * CONSUMERS * ROWS, column_block * WIDTH + tile % 2 * (WIDTH // 2),
            num_rows, num_columns, steps, BLOCK_N // 2, 2, STAGES, LAG, GATED, GELU,
        )  # fmt: skip
        turn += 1


@gluon.jit(do_not_specialize=["num_rows", "row_blocks", "column_blocks", "steps", "group",
                              "whole", "halves"])  # fmt: skip
def _hopper_product_kernel(
    x_source,  # [M, K], copied by [ROWS, BLOCK_K]
    w_source,  # [N, K], copied by [PIECE, BLOCK_K]
    out,  # [M, N], or [M, N / 2]; contiguous
    num_rows,  # M
    num_columns,  # of out
    row_blocks,  # tiles in each direction
    column_blocks,
    steps,  # copies of a row
    group,  # blocks of rows
    whole,  # tiles that are not divided
    halves,  # of the other tiles, at most one for a program
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,  # steps by which the second consumer is late
    GATED: gl.constexpr,  # the first half of the weights are gates
    GELU: gl.constexpr,
    CONSUMER: gl.constexpr,  # registers of a thread
    PRODUCER: gl.constexpr,
):
    dtype: gl.constexpr = out.dtype.element_ty
    PIECE: gl.constexpr = BLOCK_N // 4 if GATED else BLOCK_N // 2
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], SWIZZLED)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], SWIZZLED)
    w_halves = w_tiles._reinterpret(dtype, [STAGES * 2, BLOCK_N // 2, BLOCK_K], SWIZZLED)
    w_pieces = w_tiles._reinterpret(dtype, [STAGES * BLOCK_N // PIECE, PIECE, BLOCK_K], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(begun, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_consume, (
                role, out, x_tiles, w_tiles, w_halves, full, empty, begun, num_rows, num_columns,
                row_blocks, column_blocks, steps, group, whole, halves, BLOCK_N, STAGES, LAG,
                GATED, GELU,
            )) if role < CONSUMERS else (_produce, (
                x_source, w_source, x_tiles, w_pieces, full, empty, row_blocks, column_blocks,
                steps, group, whole, halves, num_columns, BLOCK_N, PIECE, STAGES, GATED,
            ))
            for role in (0, 1, 2)
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


def _divide_tiles(tiles: int, programs: int, divides: int) -> tuple[int, int]:
    """(whole tiles, halves of the others): the tiles of the last round are divided into halves if
    each program then has at most one, so that the round takes half the time."""
    last = tiles % programs
    return (tiles - last, 2 * last) if divides and 2 * last <= programs else (tiles, 0)


def multiply(
    x: Tensor,
    weight: Tensor,
    choice: Wide,
    activation: str | None = None,
    programs: int | None = None,
) -> Tensor:
    """x Wᵀ [M, N]; or act(gate) * up [M, N / 2] if the first half of W are gates.

    x: [M, K]; weight: [N, K]; see `fits`. Programs default to one for each multiprocessor.
    """
    num_rows, inputs = x.shape
    gated = activation is not None
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    width = choice.block_n // 2 if gated else choice.block_n
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    row_blocks = triton.cdiv(num_rows, CONSUMERS.value * ROWS.value)
    column_blocks = triton.cdiv(outputs, width)
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    programs = programs or num_processors(x.device)
    whole, halves = _divide_tiles(row_blocks * column_blocks, programs, choice.halves)
    _hopper_product_kernel[(min(programs, max(whole, halves)),)](
        TensorDescriptor.from_tensor(x, [ROWS.value, BLOCK_K.value], swizzled),
        TensorDescriptor.from_tensor(weight, [width // 2, BLOCK_K.value], swizzled),
        out,
        num_rows,
        outputs,
        row_blocks,
        column_blocks,
        triton.cdiv(inputs, BLOCK_K.value),
        choice.group,
        whole,
        halves,
        BLOCK_N=choice.block_n,
        STAGES=choice.stages,
        LAG=choice.lag,
        GATED=gated,
        GELU=activation == "gelu_tanh",
        CONSUMER=_CONSUMER,
        PRODUCER=_PRODUCER,
        num_warps=4,
        maxnreg=_REGISTERS,
    )
    return out


hash_functions(globals())
