"""The roles of warps in products of coded rows on Hopper; see `hopper_codes`.

The arguments that the roles share: w_boxes [STAGES * GATES, BLOCK_N, STEP] and x_boxes [STAGES,
ROWS * CONSUMERS, STEP] are shared memory as it is filled, with tiles of gate and of up if there are
two; x_tiles [STAGES * CONSUMERS, ROWS, STEP] is the memory of x_boxes as it is multiplied. Barriers
tell when a stage is full and when it is empty. If gate and up are joined, w_tiles [STAGES, 2 *
BLOCK_N, STEP] is the memory of w_boxes as it is multiplied, else it is w_boxes.
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
from triton.language.extra.cuda import gdc_wait

from ... import launch
from ...launch import hash_functions
from ...linear.triton import gemv

wait_for_inputs = gluon.jit(launch.wait_for_inputs.fn)
fetch_early = gluon.jit(launch.fetch_early.fn)
gated = gluon.jit(gemv.gated.fn)
ROWS = gl.constexpr(64)  # of a consumer
STEP = gl.constexpr(128)  # codes of a step: a row of 128 bytes, the widest that is stored swizzled


@gluon.jit
def _fetch(scales, start, end, BLOCK_N: gl.constexpr):
    """Prefetch scales of weight rows into L2."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    fetch_early(scales + gl.minimum(start + gl.arange(0, BLOCK_N, layout=layout), end - 1))


@gluon.jit
def _find_tile(
    turn, num_rows, steps, part_steps, split_k, CONSUMERS: gl.constexpr
):  # fmt: skip
    """The tile that a program takes in a turn: (block of weight rows, part, first row, first step,
    number of steps). Consecutive programs read the same weights."""
    m_blocks = gl.maximum((num_rows + ROWS * CONSUMERS - 1) // (ROWS * CONSUMERS), 1)
    index = turn * gl.num_programs(0) + gl.program_id(0)
    m_start = index % m_blocks * (ROWS * CONSUMERS)
    part = index // m_blocks % split_k
    begin = part * part_steps
    count = gl.maximum(gl.minimum(steps - begin, part_steps), 0)
    return index // m_blocks // split_k, part, m_start, begin, count


@gluon.jit
def _copy_weights(source, boxes, full, slot, row, up_row, column, GATES: gl.constexpr):
    tma.async_copy_global_to_shared(source, [row, column], full, boxes.index(slot * GATES))
    if GATES == 2:
        place = boxes.index(slot * GATES + 1)
        tma.async_copy_global_to_shared(source, [up_row, column], full, place)


@gluon.jit
def produce(
    w_source, x_source, w_boxes, x_boxes, full, empty, num_rows, num_outputs, steps, part_steps,
    split_k, mine, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    GATES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer: copies the codes of each step. Those of weights that fit into shared memory are
    on their way before the input is ready."""
    BYTES: gl.constexpr = (GATES * BLOCK_N + ROWS * CONSUMERS) * STEP
    block, _, m_start, begin, count = _find_tile(
        0, num_rows, steps, part_steps, split_k, CONSUMERS
    )  # fmt: skip
    early = gl.minimum(count, STAGES)
    row = block * BLOCK_N
    for step in range(early):
        mbarrier.expect(full.index(step), BYTES)
        at = (begin + step) * STEP
        _copy_weights(
            w_source, w_boxes, full.index(step), step, row, num_outputs + row, at, GATES
        )  # fmt: skip
    wait_for_inputs(PDL)
    for step in range(early):
        at = (begin + step) * STEP
        tma.async_copy_global_to_shared(
            x_source, [m_start, at], full.index(step), x_boxes.index(step)
        )  # fmt: skip
    fill = early  # steps copied
    for turn in range(mine):
        block, _, m_start, begin, count = _find_tile(
            turn, num_rows, steps, part_steps, split_k, CONSUMERS
        )  # fmt: skip
        row = block * BLOCK_N
        # If the outer loop set `early` to zero, Triton 3.6 would still begin each tile at its first
        # value; see `tests/kernels/test_loop_bounds.py`.
        first = 0
        if turn == 0:
            first = early
        for step in range(first, count):
            slot, phase = fill % STAGES, (fill // STAGES) & 1
            at = (begin + step) * STEP
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            _copy_weights(
                w_source, w_boxes, full.index(slot), slot, row, num_outputs + row, at, GATES
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                x_source, [m_start, at], full.index(slot), x_boxes.index(slot)
            )  # fmt: skip
            fill += 1


@gluon.jit
def _of_rows(
    x_scales, m, num_rows, group, end,
    ROW_FLOATS: gl.constexpr, BY_GROUP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scales [ROWS] of rows m in a group of 128 columns; 1 if they have none."""
    factor = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    if BY_GROUP:
        inside = (m < num_rows) & (group < end)
        factor = gl.load(x_scales + m * ROW_FLOATS + group, mask=inside, other=0.0)
    return factor


@gluon.jit
def _of_block(scales, row, group, end, stride, ROW_GROUP: gl.constexpr):
    """The scale of the block of weights that weight row `row` is in; 1 if there are none."""
    factor = 1.0
    if ROW_GROUP > 0:
        at = scales + group * stride + row // ROW_GROUP
        factor = gl.load(at, mask=group < end, other=0.0).to(gl.float32)
    return factor


@gluon.jit
def _scaled(acc, of_x, scales, bias, n, is_n, part, ROW_GROUP: gl.constexpr, BIAS: gl.constexpr):
    """Sums times the scales of whole rows, plus the bias of the columns n."""
    acc = acc * of_x[:, None]
    if ROW_GROUP == 0:
        acc = acc * gl.load(scales + n, mask=is_n, other=0.0).to(gl.float32)[None, :]
    if BIAS:
        own = gl.load(bias + n, mask=is_n & (part == 0), other=0.0).to(gl.float32)
        acc = acc + own[None, :]
    return acc


@gluon.constexpr_function
def _stored_layout(columns):
    """A thread has eight numbers of a row, and four threads follow each other, so that no thread
    needs one from another group of four. The sums of a product lie so, too."""
    later = [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *later],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, columns],
    )


@gluon.jit
def _store_coded(y, out, out_scales, block, m, is_m, out_bytes):
    """Store a group of 128 columns as codes with a scale for each row; see `packed.coded`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    largest = gl.max(gl.abs(y), 1)
    scale = gl.div_rn(gl.maximum(largest, 1e-12), gl.full_like(largest, 448.0))
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)
    row = gl.cast(m, gl.int64) * out_bytes
    gl.store(out_scales + row // 4 + block, scale, mask=is_m)
    codes = (y * inverse[:, None]).to(gl.float8e4nv)
    codes = gl.permute(gl.reshape(codes, [ROWS, 2, STEP // 2]), (0, 2, 1))
    codes = gl.convert_layout(gl.reshape(codes, [ROWS, STEP]), layout)
    line = gl.convert_layout(row, gl.SliceLayout(1, layout))
    inside = gl.convert_layout(is_m, gl.SliceLayout(1, layout))
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
    at = line[:, None] + block * STEP + column[None, :]
    gl.store(out + at, codes, mask=inside[:, None])


@gluon.jit
def consume(
    PART: gl.constexpr, x_scales, scales, bias, residual, out, out_scales, w_tiles, x_tiles, full,
    empty, num_rows, num_outputs, steps, stride, part_steps, split_k, out_bytes, mine,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    ROW_FLOATS: gl.constexpr, BY_GROUP: gl.constexpr, ROW_GROUP: gl.constexpr,
    PROMOTE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, MODE: gl.constexpr,
    ACTIVATION: gl.constexpr, CODED: gl.constexpr, WIDE_STORES: gl.constexpr,
    JOINED: gl.constexpr, DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A consumer: multiplies 64 rows of each tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 32])
    GATES: gl.constexpr = 2 if MODE == 2 else 1
    row = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    if ROW_GROUP == 0:
        block, _, _, _, _ = _find_tile(
            0, num_rows, steps, part_steps, split_k, CONSUMERS
        )  # fmt: skip
        _fetch(scales, block * BLOCK_N, num_outputs, BLOCK_N)
        if MODE == 2:
            _fetch(scales, num_outputs + block * BLOCK_N, 2 * num_outputs, BLOCK_N)
    if PDL:
        gdc_wait()
    fill = 0  # steps multiplied
    for turn in range(mine):
        block, part, m_start, begin, count = _find_tile(
            turn, num_rows, steps, part_steps, split_k, CONSUMERS
        )  # fmt: skip
        n_start = block * BLOCK_N
        m, n = m_start + row, n_start + column
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=LAYOUT)
        acc_up = acc
        if BY_GROUP or PROMOTE:
            up_start = num_outputs + n_start
            of_x = _of_rows(x_scales, m, num_rows, begin, steps, ROW_FLOATS, BY_GROUP, LAYOUT)
            of_w = _of_block(scales, n_start, begin, steps, stride, ROW_GROUP)
            of_up = of_w
            if MODE == 2:
                of_up = _of_block(scales, up_start, begin, steps, stride, ROW_GROUP)
            for step in range(count):
                slot, phase = (fill + step) % STAGES, ((fill + step) // STAGES) & 1
                now, now_w, now_up = of_x, of_w, of_up
                ahead = begin + step + 1  # loaded a step ahead
                of_x = _of_rows(x_scales, m, num_rows, ahead, steps, ROW_FLOATS, BY_GROUP, LAYOUT)
                of_w = _of_block(scales, n_start, ahead, steps, stride, ROW_GROUP)
                of_up = of_w
                if MODE == 2:
                    of_up = _of_block(scales, up_start, ahead, steps, stride, ROW_GROUP)
                mbarrier.wait(full.index(slot), phase)
                x = x_tiles.index(slot * CONSUMERS + PART)
                sums = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=LAYOUT)
                sums = warpgroup_mma(
                    x, w_tiles.index(slot * GATES).permute((1, 0)), sums, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                sums = warpgroup_mma_wait(0, deps=[sums])
                if MODE != 2:
                    mbarrier.arrive(empty.index(slot), count=1)
                acc = acc + sums * (now * now_w)[:, None]
                if MODE == 2:
                    sums = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=LAYOUT)
                    sums = warpgroup_mma(
                        x, w_tiles.index(slot * GATES + 1).permute((1, 0)), sums, use_acc=False,
                        is_async=True,
                    )  # fmt: skip
                    sums = warpgroup_mma_wait(0, deps=[sums])
                    mbarrier.arrive(empty.index(slot), count=1)
                    acc_up = acc_up + sums * (now * now_up)[:, None]
        elif JOINED:
            both = gl.zeros([ROWS, 2 * BLOCK_N], gl.float32, layout=PAIR)
            for step in range(count):
                slot, phase = (fill + step) % STAGES, ((fill + step) // STAGES) & 1
                mbarrier.wait(full.index(slot), phase)
                x = x_tiles.index(slot * CONSUMERS + PART)
                both = warpgroup_mma(
                    x, w_tiles.index(slot).permute((1, 0)), both, is_async=True
                )  # fmt: skip
                both = warpgroup_mma_wait(1, deps=[both])
                before = (fill + step + STAGES - 1) % STAGES
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
            both = warpgroup_mma_wait(0, deps=[both])
            last = (fill + count + STAGES - 1) % STAGES
            mbarrier.arrive(empty.index(last), count=1, pred=count > 0)
            halves = gl.permute(gl.reshape(both, [ROWS, 2, BLOCK_N]), (0, 2, 1))
            acc, acc_up = gl.split(halves)  # no sum moves to another thread
            acc, acc_up = gl.convert_layout(acc, LAYOUT), gl.convert_layout(acc_up, LAYOUT)
        else:
            for step in range(count):
                slot, phase = (fill + step) % STAGES, ((fill + step) // STAGES) & 1
                mbarrier.wait(full.index(slot), phase)
                x = x_tiles.index(slot * CONSUMERS + PART)
                acc = warpgroup_mma(
                    x, w_tiles.index(slot * GATES).permute((1, 0)), acc, is_async=True
                )  # fmt: skip
                if MODE == 2:
                    acc_up = warpgroup_mma(
                        x, w_tiles.index(slot * GATES + 1).permute((1, 0)), acc_up, is_async=True
                    )  # fmt: skip
                    acc, acc_up = warpgroup_mma_wait(2, deps=[acc, acc_up])
                else:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                before = (fill + step + STAGES - 1) % STAGES
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
            if MODE == 2:
                acc, acc_up = warpgroup_mma_wait(0, deps=[acc, acc_up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            last = (fill + count + STAGES - 1) % STAGES
            mbarrier.arrive(empty.index(last), count=1, pred=count > 0)
        fill += count

        is_m, is_n = m < num_rows, n < num_outputs
        of_rows = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, LAYOUT))
        if not BY_GROUP:
            of_rows = gl.load(x_scales + m * ROW_FLOATS, mask=is_m, other=0.0)
        y = _scaled(acc, of_rows, scales, bias, n, is_n, part, ROW_GROUP, BIAS)
        if MODE == 2:
            up = _scaled(
                acc_up, of_rows, scales, bias, n + num_outputs, is_n, part, ROW_GROUP, BIAS
            )  # fmt: skip
            y = gated(y, up, ACTIVATION)
        if CODED:  # rounded first, as if it were numbers that are coded later
            y = gl.where(is_n[None, :], y, 0.0).to(DTYPE).to(gl.float32)
            _store_coded(y, out, out_scales, block, m, is_m, out_bytes)
        else:
            inside = is_m[:, None] & is_n[None, :]
            first = part * num_rows
            at = gl.cast(first + m, gl.int64)[:, None] * num_outputs + n[None, :]
            if RESIDUAL:
                y = y + gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
            if WIDE_STORES:
                STORED: gl.constexpr = _stored_layout(BLOCK_N)
                m = m_start + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
                n = n_start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, STORED))
                inside = (m < num_rows)[:, None] & (n < num_outputs)[None, :]
                at = gl.cast(first + m, gl.int64)[:, None] * num_outputs + n[None, :]
                y = gl.convert_layout(y.to(out.dtype.element_ty), STORED)
            gl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


hash_functions(globals())
