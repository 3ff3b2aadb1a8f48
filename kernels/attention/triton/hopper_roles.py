"""The roles of warps in the attention of long queries on Hopper; see `hopper_prefill`.

The arguments that the roles share: q_pieces [2 * PANELS, ROWS / HEADS, HEADS, PANEL], k_pieces and
v_pieces [STAGES * PANELS * (BLOCK_N / PIECE), PIECE, PANEL] are shared memory as it is filled;
q_tiles [2, ROWS, DIM], k_tiles and v_tiles [STAGES, BLOCK_N, DIM] are the same memory as it is
multiplied. Each has barriers that tell when it is full and when it is empty.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...launch import hash_functions

LOG2E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-1e30)  # start of a running maximum; unlike -inf it can be subtracted
ROWS = gl.constexpr(64)  # query rows of a consumer, tokens times heads
PANEL = gl.constexpr(64)  # values of a row of 128 bytes, the widest that is stored swizzled


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _blocks_of_requests(query_start_loc, num_reqs, longer_than, BLOCK_Q: gl.constexpr,
                        BLOCK_R: gl.constexpr):  # fmt: skip
    """The request numbers, the query blocks of each and their running sum, all [BLOCK_R]."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_R // 32], [32], [gl.num_warps()], [0])
    each = gl.arange(0, BLOCK_R, layout=layout)
    lens = gl.load(query_start_loc + 1 + each, mask=each < num_reqs, other=0)
    lens -= gl.load(query_start_loc + each, mask=each < num_reqs, other=0)
    own = gl.where(lens > longer_than, (lens + BLOCK_Q - 1) // BLOCK_Q, 0)
    return each, own, gl.associative_scan(own, 0, _add)


@gluon.jit
def _count_tiles(query_start_loc, num_reqs, longer_than, HEAD_BLOCKS: gl.constexpr,
                 BLOCK_Q: gl.constexpr, BLOCK_R: gl.constexpr):  # fmt: skip
    """The tiles of the launch, and how many of them this program takes."""
    _, _, upto = _blocks_of_requests(query_start_loc, num_reqs, longer_than, BLOCK_Q, BLOCK_R)
    tiles = gl.max(upto, 0) * HEAD_BLOCKS
    programs, program = gl.num_programs(0), gl.program_id(0)
    rounds = tiles // programs
    place = program  # in the last, incomplete round
    if rounds % 2 == 1:
        place = programs - 1 - program
    mine = rounds
    if place < tiles % programs:
        mine = rounds + 1
    return tiles, mine


@gluon.jit
def _find_tile(query_start_loc, seq_lens, tiles, turn, num_reqs, longer_than,
               HEAD_BLOCKS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_R: gl.constexpr,
               BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):  # fmt: skip
    """Find the tile that a program takes in a turn.

    Late tiles have the most keys and come first. The order of programs is reversed in every second
    turn, so that all of them get about as many keys. Returns the request, its first token row and
    number of rows, the keys before these, the tile's first query token, its block of heads, the end
    of its keys, its last block of keys and the number of them.
    """
    programs, program = gl.num_programs(0), gl.program_id(0)
    place = program
    if turn % 2 == 1:
        place = programs - 1 - program
    index = turn * programs + place
    block = tiles // HEAD_BLOCKS - 1 - index // HEAD_BLOCKS
    each, own, upto = _blocks_of_requests(
        query_start_loc, num_reqs, longer_than, BLOCK_Q, BLOCK_R
    )  # fmt: skip
    request = gl.sum(gl.cast(upto <= block, gl.int32), 0)
    first = (block - gl.sum(gl.where(each == request, upto - own, 0), 0)) * BLOCK_Q
    start = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - start
    cached = gl.load(seq_lens + request) - query_len
    high = cached + gl.minimum(query_len, first + BLOCK_Q)
    low_block = 0
    if WINDOW > 0:
        low_block = gl.maximum(0, cached + first - WINDOW + 1) // BLOCK_N
    high_block = (high - 1) // BLOCK_N
    count = high_block - low_block + 1
    head_block = index % HEAD_BLOCKS
    return request, start, query_len, cached, first, head_block, high, high_block, count


@gluon.jit
def _find_rows(table, key_start, low, high, no_page, PAGE: gl.constexpr, PIECE: gl.constexpr,
               BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):  # fmt: skip
    """The first cached row of each piece of a block of keys. Pieces without a key in [low, high)
    get a row beyond the cache, where copies read zeros: a page before the window may hold another
    request's values by now, which need not be finite."""
    rows = ()
    for i in gl.static_range(BLOCK_N // PIECE):
        at = key_start + i * PIECE
        used = at < high
        if WINDOW > 0:
            used = used & (at + PIECE > low)
        page = gl.load(table + at // PAGE, mask=used, other=no_page)
        rows = rows + (page * PAGE + at % PAGE,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _copy_block(source, pieces, full, slot, rows, column, DIM: gl.constexpr, PIECE: gl.constexpr,
                BLOCK_N: gl.constexpr):  # fmt: skip
    """Copy a block of keys or values piece by piece."""
    mbarrier.expect(full, BLOCK_N * DIM * 2)
    panels: gl.constexpr = DIM // PANEL
    count: gl.constexpr = BLOCK_N // PIECE
    for i in gl.static_range(count):
        for panel in gl.static_range(panels):
            place = pieces.index((slot * panels + panel) * count + i)
            tma.async_copy_global_to_shared(source, [rows[i], column + panel * PANEL], full, place)


@gluon.jit
def produce(
    q_source, k_source, v_source, block_table, query_start_loc, seq_lens, q_pieces, k_pieces,
    v_pieces, q_full, q_empty, k_full, k_empty, v_full, v_empty, num_reqs, longer_than,
    table_stride, no_page,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, DIM: gl.constexpr,
    PAGE: gl.constexpr, PIECE: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_R: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer: copies the queries of each tile, then its keys and values, last block first."""
    panels: gl.constexpr = DIM // PANEL
    tokens: gl.constexpr = ROWS // HEADS
    tiles, mine = _count_tiles(
        query_start_loc, num_reqs, longer_than, HEAD_BLOCKS, BLOCK_Q, BLOCK_R
    )  # fmt: skip
    fill = 0  # blocks copied
    for turn in range(mine):
        request, start, _, cached, first, head_block, high, high_block, count = _find_tile(
            query_start_loc, seq_lens, tiles, turn, num_reqs, longer_than,
            HEAD_BLOCKS, BLOCK_Q, BLOCK_R, BLOCK_N, WINDOW,
        )  # fmt: skip
        table = block_table + gl.cast(request, gl.int64) * table_stride
        column = head_block * HEADS // GROUP * DIM
        low = cached + first - WINDOW + 1
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, 2 * ROWS * DIM * 2)
        for part in gl.static_range(2):
            for panel in gl.static_range(panels):
                corner = [start + first + part * tokens, head_block * HEADS, panel * PANEL]
                place = q_pieces.index(part * panels + panel)
                tma.async_copy_global_to_shared(q_source, corner, q_full, place)
        for step in range(count):
            slot, phase = fill % STAGES, (fill // STAGES) & 1
            key_start = (high_block - step) * BLOCK_N
            rows = _find_rows(table, key_start, low, high, no_page, PAGE, PIECE, BLOCK_N, WINDOW)
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            _copy_block(
                k_source, k_pieces, k_full.index(slot), slot, rows, column, DIM, PIECE, BLOCK_N
            )  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            _copy_block(
                v_source, v_pieces, v_full.index(slot), slot, rows, column, DIM, PIECE, BLOCK_N
            )  # fmt: skip
            fill += 1


@gluon.jit
def _soften(scores, top, total, last, key_start, scale, softcap, S_LAYOUT: gl.constexpr,
            BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
            MASKED: gl.constexpr):  # fmt: skip
    """Add scores [ROWS, BLOCK_N] to the running softmax: (weights, top, total, rescale)."""
    factor = scale * LOG2E
    if SOFTCAP:
        capped = gl.exp2(2.0 * LOG2E * scale * scores / softcap) + 1.0
        scores = softcap * (1.0 - 2.0 / capped)
        factor = LOG2E
    if MASKED:
        at = key_start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        visible = at[None, :] <= last[:, None]
        if WINDOW > 0:
            visible = visible & (at[None, :] > last[:, None] - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    rescale = gl.exp2(top - new_top)
    weights = gl.exp2(scores * factor - new_top[:, None])
    return weights, new_top, total * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _absorb_block(
    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, fill, key_start, acc, weights,
    top, total, last, scale, softcap,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALTERNATE: gl.constexpr, PART: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Score block `fill` of keys, while the weights of the block before it meet their values."""
    slot, phase = fill % STAGES, (fill // STAGES) & 1
    before, before_phase = (fill - 1) % STAGES, ((fill - 1) // STAGES) & 1
    if ALTERNATE:  # of the two consumers, exactly one passes first, whichever it is
        mbarrier.wait(turns.index(PART), (fill & 1) ^ (1 - PART))
    mbarrier.wait(k_full.index(slot), phase)
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S_LAYOUT)
    scores = warpgroup_mma(
        q, k_tiles.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True
    )  # fmt: skip
    mbarrier.wait(v_full.index(before), before_phase)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    if ALTERNATE:
        mbarrier.arrive(turns.index(1 - PART), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(slot), count=1)
    new_weights, top, total, rescale = _soften(
        scores, top, total, last, key_start, scale, softcap, S_LAYOUT, BLOCK_N, WINDOW, SOFTCAP,
        MASKED,
    )  # fmt: skip
    # This barrier has passed already. Without the branch the assembler moves the softmax behind the
    # wait for the products that it should overlap with.
    mbarrier.wait(v_full.index(before), before_phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    operand: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    return acc, gl.convert_layout(new_weights.to(weights.dtype), operand), top, total


@gluon.jit
def _clear_tail(v_pieces, slot, key_start, high, DIM: gl.constexpr, PIECE: gl.constexpr,
                BLOCK_N: gl.constexpr):  # fmt: skip
    """Zero the rows from `high` on of the page in which the keys end, since they may hold NaN.

    Both consumers do so; they write the same, and each waits for its own writes only.
    """
    panels: gl.constexpr = DIM // PANEL
    count: gl.constexpr = BLOCK_N // PIECE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    piece = (high - key_start) // PIECE
    for panel in gl.static_range(panels):
        place = v_pieces.index((slot * panels + panel) * count + piece)
        values = place.load(layout)
        inside = (key_start + piece * PIECE + row)[:, None] < high
        place.store(gl.where(inside, values, 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def consume(
    PART: gl.constexpr, out, sinks, query_start_loc, seq_lens, q_tiles, k_tiles, v_tiles, v_pieces,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, scale, softcap, num_reqs, longer_than,
    Q_HEADS: gl.constexpr, HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, DIM: gl.constexpr,
    PIECE: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_R: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    ALTERNATE: gl.constexpr,
):  # fmt: skip
    """A consumer: attends with ROWS query rows of each tile, the first or the second half."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    tiles, mine = _count_tiles(
        query_start_loc, num_reqs, longer_than, HEAD_BLOCKS, BLOCK_Q, BLOCK_R
    )  # fmt: skip
    q = q_tiles.index(PART)
    fill = 0  # blocks absorbed
    for turn in range(mine):
        _, start, query_len, cached, first, head_block, high, high_block, count = _find_tile(
            query_start_loc, seq_lens, tiles, turn, num_reqs, longer_than,
            HEAD_BLOCKS, BLOCK_Q, BLOCK_R, BLOCK_N, WINDOW,
        )  # fmt: skip
        first += PART * (ROWS // HEADS)
        last = cached + first + row // HEADS  # [ROWS] position, the last key that the row sees
        masked = count  # blocks that some row sees in part; one at least, which comes first
        if WINDOW == 0:
            masked = gl.minimum(
                gl.maximum(high_block + 1 - (cached + first + 1) // BLOCK_N, 1), count
            )
        top = gl.full([ROWS], LEAST, gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
        if SINKS:
            sink = gl.load(sinks + head_block * HEADS + row % HEADS)
            top = sink.to(gl.float32) * LOG2E
            total += 1.0
        slot, phase = fill % STAGES, (fill // STAGES) & 1
        mbarrier.wait(q_full, turn & 1)
        mbarrier.wait(k_full.index(slot), phase)
        scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S_LAYOUT)
        scores = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), scores, use_acc=False)
        mbarrier.arrive(k_empty.index(slot), count=1)
        key_start = high_block * BLOCK_N
        weights, top, total, _ = _soften(
            scores, top, total, last, key_start, scale, softcap, S_LAYOUT, BLOCK_N, WINDOW, SOFTCAP,
            True,
        )  # fmt: skip
        weights = gl.convert_layout(weights.to(out.dtype.element_ty), operand)
        if high % PIECE != 0:
            mbarrier.wait(v_full.index(slot), phase)
            _clear_tail(v_pieces, slot, key_start, high, DIM, PIECE, BLOCK_N)
        acc = gl.zeros([ROWS, DIM], gl.float32, layout=O_LAYOUT)
        for step in range(1, masked):
            acc, weights, top, total = _absorb_block(
                q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, fill + step,
                (high_block - step) * BLOCK_N, acc, weights, top, total, last, scale, softcap,
                S_LAYOUT, O_LAYOUT, BLOCK_N, STAGES, WINDOW, SOFTCAP, ALTERNATE, PART, True,
            )  # fmt: skip
        for step in range(masked, count):
            acc, weights, top, total = _absorb_block(
                q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, fill + step,
                (high_block - step) * BLOCK_N, acc, weights, top, total, last, scale, softcap,
                S_LAYOUT, O_LAYOUT, BLOCK_N, STAGES, WINDOW, SOFTCAP, ALTERNATE, PART, WINDOW > 0,
            )  # fmt: skip
        mbarrier.arrive(q_empty, count=1)
        fill += count
        slot, phase = (fill - 1) % STAGES, ((fill - 1) // STAGES) & 1
        mbarrier.wait(v_full.index(slot), phase)
        acc = warpgroup_mma(weights, v_tiles.index(slot), acc)
        mbarrier.arrive(v_empty.index(slot), count=1)

        inverse = gl.convert_layout(
            1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, O_LAYOUT)
        )  # fmt: skip
        result = gl.convert_layout((acc * inverse[:, None]).to(out.dtype.element_ty), stored)
        at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, stored))
        dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, stored))
        within = first + at // HEADS
        flat = gl.cast(start + within, gl.int64) * Q_HEADS + head_block * HEADS + at % HEADS
        gl.store(
            out + flat[:, None] * DIM + dim[None, :], result, mask=(within < query_len)[:, None]
        )


hash_functions(globals())
