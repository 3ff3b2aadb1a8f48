"""The roles of warps in the products between two attentions, for one row; see `hopper_row`.

A product is (words, scales, factors of whole rows). The words are a descriptor of [spans, blocks,
8, 64], or of [spans, 2, N, 64] of gate and up; the scales of [groups, blocks, 8], or of [groups, 2,
N].

A step of the rings holds SPANS spans of 16 weight rows: w_ring [STAGES, SPANS, 2, 8, 64] int16 and
s_ring [STAGES, SPANS * GROUPS, 2, 8]. Each stage has barriers that tell when it is full and when it
is empty. partials [MOST, SPANS, 16] float32 has the sums of each tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....launch import hash_functions
from .hopper_row_steps import HEIGHT, multiply_tiles, take
from .meet_programs import meet_programs, sign_of
from .row_inputs import stage_input

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _copy_tiles(
    product, w_ring, s_ring, full, empty, fill, tiles,
    STEPS: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, FLYING: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = SPANS * HEIGHT * (128 + 2 * GROUPS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, row = tile * 2, 0
        if GATED:
            block, row = 0, tile * 8
        for step in range(STEPS):
            slot, phase = fill % STAGES, (fill // STAGES) & 1
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            before = fill - FLYING
            mbarrier.wait(
                full.index((before + STAGES) % STAGES), (before // STAGES) & 1, pred=before >= 0
            )  # fmt: skip
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(
                product[0], [step * SPANS, block, row, 0], ready, w_ring.index(slot)
            )  # fmt: skip
            if GROUPS > 0:
                tma.async_copy_global_to_shared(
                    product[1], [step * (SPANS * GROUPS), block, row], ready, s_ring.index(slot)
                )  # fmt: skip
            fill += 1
    return fill


@gluon.jit
def bring_words(
    o, gate_up, down, qkv, w_ring, s_ring, full, empty,
    TILES: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, FLYING: gl.constexpr,
):  # fmt: skip
    """The producer: copies the words and scales of all products, as far ahead as there is memory.

    No kernel writes them, so it waits for nothing else. At most FLYING steps are on their way, or
    what other warps read would queue behind them.
    """
    ring = w_ring, s_ring, full, empty
    fill = 0  # steps copied
    fill = _copy_tiles(
        o, *ring, fill, TILES[0], STEPS[0], False, GROUPS, SPANS, STAGES, FLYING
    )  # fmt: skip
    fill = _copy_tiles(
        gate_up, *ring, fill, TILES[1], STEPS[1], True, GROUPS, SPANS, STAGES, FLYING
    )  # fmt: skip
    fill = _copy_tiles(
        down, *ring, fill, TILES[2], STEPS[2], False, GROUPS, SPANS, STAGES, FLYING
    )  # fmt: skip
    if TILES[3] > 0:
        _copy_tiles(
            qkv, *ring, fill, TILES[3], STEPS[3], False, GROUPS, SPANS, STAGES, FLYING
        )  # fmt: skip


@gluon.jit
def _rows_of(tiles, TURNS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight rows [TURNS, ROWS] of this program's tiles, and whether there are such tiles."""
    turn = gl.arange(0, TURNS, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    n = tile[:, None] * ROWS + row[None, :]
    inside, n = gl.broadcast((tile < tiles)[:, None], n)
    return n, inside


@gluon.jit
def _load_rows(source, rows):
    """Numbers at such rows. Those of all tiles are loaded at once, and early, because a load behind
    words on their way takes as long as these."""
    return gl.load(source + rows[0], mask=rows[1], other=0.0).to(gl.float32)


@gluon.jit
def _load_squares(squares, PROGRAMS: gl.constexpr, SPANS: gl.constexpr):
    """The sums of squares of all programs."""
    each = gl.arange(0, PROGRAMS, layout=gl.BlockedLayout([1], [32], [SPANS], [0]))
    return gl.load(squares + each, mask=each < gl.num_programs(0), other=0.0)


@gluon.jit
def _results(
    partials,
    FIRST: gl.constexpr, TURNS: gl.constexpr, MOST: gl.constexpr, SPANS: gl.constexpr,
    ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums [TURNS, ROWS] over spans of ROWS rows of each tile, from its FIRST on."""
    whole = partials._reinterpret(
        gl.float32, [MOST, SPANS, HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )  # fmt: skip
    return gl.sum(whole.slice(0, TURNS, 0).slice(FIRST, ROWS, 2).load(LAYOUT), 1)


@gluon.jit
def _add_to_stream(y, stream, gain, rows, out, normed, squares, STORE: gl.constexpr):
    """Add results to the stream, and store that if STORE, its product with the norm's weight, and
    the sum of its squares. Returns the stream as it is rounded."""
    dtype: gl.constexpr = normed.dtype.element_ty
    rounded = (y + stream).to(dtype)
    if STORE:
        gl.store(out + rows[0], rounded, mask=rows[1])
    wide = gl.where(rows[1], rounded.to(gl.float32), 0.0)
    gl.store(normed + rows[0], (wide * gain).to(dtype), mask=rows[1])
    gl.store(squares + gl.program_id(0), gl.sum(gl.sum(wide * wide, 1), 0))
    return wide


@gluon.jit
def _count_tiles(tiles):
    """The tiles of this program."""
    programs = gl.num_programs(0)
    return (tiles + programs - 1 - gl.program_id(0)) // programs


@gluon.jit
def multiply_all(
    o, gate_up, down, qkv, x, residual, gain, normed, inner, next_gain, stream, next_normed,
    out, squares, counter, eps, next_eps, patience, w_ring, s_ring, full, empty, partials,
    x_shared,
    TILES: gl.constexpr, STEPS: gl.constexpr, TURNS: gl.constexpr, MOST: gl.constexpr,
    GROUPS: gl.constexpr, SLICES: gl.constexpr, FACTORS: gl.constexpr,
    SIZES: gl.constexpr, PROGRAMS: gl.constexpr, SPANS: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, SCALE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The consumer, of as many warps as a step has spans: computes one product after the other."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPANS, 1, 1], [1, 16, 8])
    # Layouts of results [turns, SPANS, rows], in which a sum over spans moves no number.
    WHOLE: gl.constexpr = gl.BlockedLayout([1, SPANS, 1], [2, 1, 16], [SPANS, 1, 1], [2, 1, 0])
    HALF: gl.constexpr = gl.BlockedLayout([1, SPANS, 1], [4, 1, 8], [SPANS, 1, 1], [2, 1, 0])
    w_tiles = w_ring._reinterpret(
        gl.int16, [STAGES, SPANS, HEIGHT, 64], gl.NVMMASharedLayout(128, 16, 3)
    )  # fmt: skip
    s_tiles = s_ring
    if GROUPS > 0:
        s_tiles = s_ring._reinterpret(
            SCALE, [STAGES, SPANS, GROUPS * HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )  # fmt: skip
    ring = w_tiles, s_tiles, full, empty
    hidden, width = SIZES[1], SIZES[2]
    of_hidden = _rows_of(TILES[0], TURNS[0], HEIGHT, gl.SliceLayout(1, WHOLE))
    of_gate = _rows_of(TILES[1], TURNS[1], 8, gl.SliceLayout(1, HALF))
    of_qkv = _rows_of(TILES[3], TURNS[3], HEIGHT, gl.SliceLayout(1, WHOLE))
    gains, next_gains = _load_rows(gain, of_hidden), _load_rows(next_gain, of_hidden)
    o_factors, down_factors, gate_factors, up_factors, qkv_factors = 1.0, 1.0, 1.0, 1.0, 1.0
    if GROUPS == 0:
        o_factors, down_factors = _load_rows(o[2], of_hidden), _load_rows(down[2], of_hidden)
        gate_factors = _load_rows(gate_up[2], of_gate)
        up_factors = _load_rows(gate_up[2] + width, of_gate)
        qkv_factors = _load_rows(qkv[2], of_qkv)
    total = 0
    for i in gl.static_range(4):
        total += _count_tiles(TILES[i]) * STEPS[i]
    fill = 0  # steps multiplied
    words, scales = take(*ring, fill, total, GROUPS, SUMS, STAGES)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    sign = sign_of(counter)
    streams = _load_rows(residual, of_hidden)
    inputs = stage_input(x, x_shared, SIZES[0], STEPS[0], SLICES, SPANS)
    fill, words, scales = multiply_tiles(
        inputs, partials, _count_tiles(TILES[0]), *ring, fill, total, words, scales,
        STEPS[0], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD,
    )  # fmt: skip
    y = _results(partials, 0, TURNS[0], MOST, SPANS, HEIGHT, WHOLE) * o_factors
    streams = _add_to_stream(y, streams, gains, of_hidden, normed, normed, squares, False)
    sign = meet_programs(counter, sign, patience)
    inputs = stage_input(normed, x_shared, hidden, STEPS[1], SLICES, SPANS)
    parts = _load_squares(squares, PROGRAMS, SPANS)
    fill, words, scales = multiply_tiles(
        inputs, partials, _count_tiles(TILES[1]), *ring, fill, total, words, scales,
        STEPS[1], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD,
    )  # fmt: skip
    scale = gl.rsqrt(gl.sum(parts, 0) / hidden + eps)
    gate = _results(partials, 0, TURNS[1], MOST, SPANS, 8, HALF) * gate_factors * scale
    up = _results(partials, 8, TURNS[1], MOST, SPANS, 8, HALF) * up_factors * scale
    fed = gate / (1.0 + gl.exp2(-LOG2E * gate)) * up
    gl.store(inner + of_gate[0], fed.to(inner.dtype.element_ty), mask=of_gate[1])
    sign = meet_programs(counter, sign, patience)
    inputs = stage_input(inner, x_shared, width, STEPS[2], SLICES, SPANS)
    fill, words, scales = multiply_tiles(
        inputs, partials, _count_tiles(TILES[2]), *ring, fill, total, words, scales,
        STEPS[2], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD,
    )  # fmt: skip
    following = squares + PROGRAMS
    y = _results(partials, 0, TURNS[2], MOST, SPANS, HEIGHT, WHOLE) * down_factors
    _add_to_stream(y, streams, next_gains, of_hidden, stream, next_normed, following, True)
    if PDL and not EARLY:
        gdc_launch_dependents()
    if TILES[3] > 0:
        sign = meet_programs(counter, sign, patience)
        inputs = stage_input(next_normed, x_shared, hidden, STEPS[3], SLICES, SPANS)
        parts = _load_squares(following, PROGRAMS, SPANS)
        multiply_tiles(
            inputs, partials, _count_tiles(TILES[3]), *ring, fill, total, words, scales,
            STEPS[3], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD,
        )  # fmt: skip
        scale = gl.rsqrt(gl.sum(parts, 0) / hidden + next_eps)
        last = _results(partials, 0, TURNS[3], MOST, SPANS, HEIGHT, WHOLE) * qkv_factors * scale
        gl.store(out + of_qkv[0], last.to(out.dtype.element_ty), mask=of_qkv[1])


hash_functions(globals())
