"""The roles of warps in the products between two attentions, for few rows; see `hopper_row`.

A product is (words, scales, factors of whole rows). The words are a descriptor of [spans, blocks,
8, 64], or of [spans, 2, N, 64] of gate and up; the scales of [groups, blocks, 8], or of [groups, 2,
N].

A step of the rings holds SPANS spans of 16 weight rows: w_ring [STAGES, SPANS, 2, 8, 64] int16 and
s_ring [STAGES, SPANS * GROUPS, 2, 8]. Each stage has barriers that tell when it is full and when it
is empty. partials [MOST, SPANS, 16] float32 has the sums of each tile.

With ROWS above 1, a power of 2, results [turns, 16 * ROWS] are those of all rows for one weight
row after the other. partials are [turns, SPANS, 16 * ROWS] then.
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
from .row_inputs import stage_input, stage_rows

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


@gluon.constexpr_function
def _layout_of(values, spans):
    """Of results [turns, SPANS, values]: a sum over spans moves no number."""
    lanes = min(32, values)
    return gl.BlockedLayout([1, spans, 1], [32 // lanes, 1, lanes], [spans, 1, 1], [2, 1, 0])


@gluon.jit
def _places_of(
    tiles, TURNS: gl.constexpr, HIGH: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The weight rows [TURNS, HIGH * ROWS] of this program's tiles of HIGH, whether there are such
    tiles, the places of results in [ROWS, tiles * HIGH], and their rows."""
    turn = gl.arange(0, TURNS, layout=gl.SliceLayout(1, LAYOUT))
    each = gl.arange(0, HIGH * ROWS, layout=gl.SliceLayout(0, LAYOUT))
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    row = 0
    if ROWS > 1:
        row = (each % ROWS)[None, :]
        each = each // ROWS
    n = tile[:, None] * HIGH + each[None, :]
    inside, n = gl.broadcast((tile < tiles)[:, None], n)
    at = n
    if ROWS > 1:
        at = n + row * (tiles * HIGH)
    return n, inside, at, row


@gluon.jit
def _load_factors(source, places):
    """Numbers of weight rows. Those of all tiles are loaded at once, and early, because a load
    behind words on their way takes as long as these."""
    return gl.load(source + places[0], mask=places[1], other=0.0).to(gl.float32)


@gluon.jit
def _load_stream(residual, places, count, ROWS: gl.constexpr):
    """The stream before the layer, of `count` rows; zeros are the others."""
    inside = places[1]
    if ROWS > 1:
        inside = inside & (places[3] < count)
    return gl.load(residual + places[2], mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _load_squares(squares, PROGRAMS: gl.constexpr, SPANS: gl.constexpr, ROWS: gl.constexpr):
    """The sums of squares of all programs, [PROGRAMS] or [ROWS, PROGRAMS]."""
    if ROWS == 1:
        each = gl.arange(0, PROGRAMS, layout=gl.BlockedLayout([1], [32], [SPANS], [0]))
        found = gl.load(squares + each, mask=each < gl.num_programs(0), other=0.0)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [ROWS, 32 // ROWS], [1, SPANS], [0, 1])
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        each = gl.arange(0, PROGRAMS, layout=gl.SliceLayout(0, LAYOUT))
        at = row[:, None] * PROGRAMS + each[None, :]
        inside, at = gl.broadcast((each < gl.num_programs(0))[None, :], at)
        found = gl.load(squares + at, mask=inside, other=0.0)
    return found


@gluon.jit
def _scale_of(
    parts, hidden, eps,
    HIGH: gl.constexpr, ROWS: gl.constexpr, SPANS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The norm's factor of results, from sums of squares."""
    scale = gl.rsqrt(gl.sum(parts, 0 if ROWS == 1 else 1) / hidden + eps)
    if ROWS > 1:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ROWS, ROWS], [1, SPANS], [1, 0])
        scale = gl.convert_layout(scale, gl.SliceLayout(0, WIDE), assert_trivial=True)
        shape = gl.zeros([HIGH, ROWS], gl.float32, layout=WIDE)
        _, scale = gl.broadcast(shape, scale[None, :])
        scale = gl.reshape(scale, [HIGH * ROWS])
        scale = gl.convert_layout(scale, gl.SliceLayout(0, LAYOUT), assert_trivial=True)[None, :]
    return scale


@gluon.jit
def _results(
    partials, FIRST: gl.constexpr, TURNS: gl.constexpr, SPANS: gl.constexpr,
    HIGH: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums [TURNS, HIGH * ROWS] over spans of HIGH rows of each tile, from its FIRST on."""
    MOST: gl.constexpr = partials.shape[0]
    whole = partials._reinterpret(
        gl.float32, [MOST, SPANS, HEIGHT * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )  # fmt: skip
    return gl.sum(whole.slice(0, TURNS, 0).slice(FIRST * ROWS, HIGH * ROWS, 2).load(LAYOUT), 1)


@gluon.jit
def _add_to_stream(
    y, stream, gain, places, out, normed, squares,
    STORE: gl.constexpr, TURNS: gl.constexpr, ROWS: gl.constexpr, PROGRAMS: gl.constexpr,
    SPANS: gl.constexpr,
):  # fmt: skip
    """Add results to the stream, and store that if STORE, its product with the norm's weight, and
    the sum of its squares. Returns the stream as it is rounded."""
    dtype: gl.constexpr = normed.dtype.element_ty
    rounded = (y + stream).to(dtype)
    if STORE:
        gl.store(out + places[2], rounded, mask=places[1])
    wide = gl.where(places[1], rounded.to(gl.float32), 0.0)
    gl.store(normed + places[2], (wide * gain).to(dtype), mask=places[1])
    if ROWS == 1:
        gl.store(squares + gl.program_id(0), gl.sum(gl.sum(wide * wide, 1), 0))
    else:
        each = gl.sum(gl.sum(gl.reshape(wide * wide, [TURNS, HEIGHT, ROWS]), 1), 0)
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [SPANS], [0])
        row = gl.arange(0, ROWS, layout=LINE)
        each = gl.convert_layout(each, LINE, assert_trivial=True)
        gl.store(squares + row * PROGRAMS + gl.program_id(0), each)
    return wide


@gluon.jit
def _stage(
    source, count, size, x_shared, partials,
    STEPS: gl.constexpr, TURNS: gl.constexpr, SLICES: gl.constexpr, SPANS: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Copy the input of a product, `count` rows [size]. Returns it and memory for its sums."""
    if ROWS == 1:
        inputs = stage_input(source, x_shared, size, STEPS, SLICES, SPANS)
    else:
        partials = gl.allocate_shared_memory(
            gl.float32, [TURNS, SPANS, HEIGHT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )  # fmt: skip
        inputs = stage_rows(source, count, size, STEPS, SLICES, ROWS, SPANS)
    return inputs, partials


@gluon.jit
def _count_tiles(tiles):
    """The tiles of this program."""
    programs = gl.num_programs(0)
    return (tiles + programs - 1 - gl.program_id(0)) // programs


@gluon.jit
def multiply_all(
    o, gate_up, down, qkv, x, residual, gain, normed, inner, next_gain, stream, next_normed,
    out, squares, counter, eps, next_eps, patience, count, w_ring, s_ring, full, empty, partials,
    x_shared,
    TILES: gl.constexpr, STEPS: gl.constexpr, TURNS: gl.constexpr, GROUPS: gl.constexpr,
    SLICES: gl.constexpr, FACTORS: gl.constexpr, SIZES: gl.constexpr, PROGRAMS: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, SCALE: gl.constexpr,
    EARLY: gl.constexpr, ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The consumer, of as many warps as a step has spans: computes one product after the other."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPANS, 1, 1], [1, 16, 8])
    WHOLE: gl.constexpr = _layout_of(HEIGHT * ROWS, SPANS)
    HALF: gl.constexpr = _layout_of(8 * ROWS, SPANS)
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
    of_hidden = _places_of(TILES[0], TURNS[0], HEIGHT, ROWS, gl.SliceLayout(1, WHOLE))
    of_gate = _places_of(TILES[1], TURNS[1], 8, ROWS, gl.SliceLayout(1, HALF))
    of_qkv = _places_of(TILES[3], TURNS[3], HEIGHT, ROWS, gl.SliceLayout(1, WHOLE))
    gains, next_gains = _load_factors(gain, of_hidden), _load_factors(next_gain, of_hidden)
    o_factors, down_factors, gate_factors, up_factors, qkv_factors = 1.0, 1.0, 1.0, 1.0, 1.0
    if GROUPS == 0:
        o_factors, down_factors = _load_factors(o[2], of_hidden), _load_factors(down[2], of_hidden)
        gate_factors = _load_factors(gate_up[2], of_gate)
        up_factors = _load_factors(gate_up[2] + width, of_gate)
        qkv_factors = _load_factors(qkv[2], of_qkv)
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
    streams = _load_stream(residual, of_hidden, count, ROWS)
    inputs, partials = _stage(
        x, count, SIZES[0], x_shared, partials, STEPS[0], TURNS[0], SLICES, SPANS, ROWS
    )  # fmt: skip
    fill, words, scales = multiply_tiles(
        inputs, partials, _count_tiles(TILES[0]), *ring, fill, total, words, scales,
        STEPS[0], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, ROWS,
    )  # fmt: skip
    y = _results(partials, 0, TURNS[0], SPANS, HEIGHT, ROWS, WHOLE) * o_factors
    streams = _add_to_stream(
        y, streams, gains, of_hidden, normed, normed, squares, False, TURNS[0], ROWS, PROGRAMS,
        SPANS,
    )  # fmt: skip
    sign = meet_programs(counter, sign, patience)
    inputs, partials = _stage(
        normed, ROWS, hidden, x_shared, partials, STEPS[1], TURNS[1], SLICES, SPANS, ROWS
    )  # fmt: skip
    parts = _load_squares(squares, PROGRAMS, SPANS, ROWS)
    fill, words, scales = multiply_tiles(
        inputs, partials, _count_tiles(TILES[1]), *ring, fill, total, words, scales,
        STEPS[1], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, ROWS,
    )  # fmt: skip
    scale = _scale_of(parts, hidden, eps, 8, ROWS, SPANS, gl.SliceLayout(1, HALF))
    gate = _results(partials, 0, TURNS[1], SPANS, 8, ROWS, HALF) * gate_factors * scale
    up = _results(partials, 8, TURNS[1], SPANS, 8, ROWS, HALF) * up_factors * scale
    fed = gate / (1.0 + gl.exp2(-LOG2E * gate)) * up
    gl.store(inner + of_gate[2], fed.to(inner.dtype.element_ty), mask=of_gate[1])
    sign = meet_programs(counter, sign, patience)
    inputs, partials = _stage(
        inner, ROWS, width, x_shared, partials, STEPS[2], TURNS[2], SLICES, SPANS, ROWS
    )  # fmt: skip
    fill, words, scales = multiply_tiles(
        inputs, partials, _count_tiles(TILES[2]), *ring, fill, total, words, scales,
        STEPS[2], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, ROWS,
    )  # fmt: skip
    following = squares + ROWS * PROGRAMS
    y = _results(partials, 0, TURNS[2], SPANS, HEIGHT, ROWS, WHOLE) * down_factors
    _add_to_stream(
        y, streams, next_gains, of_hidden, stream, next_normed, following, True, TURNS[2], ROWS,
        PROGRAMS, SPANS,
    )  # fmt: skip
    if PDL and not EARLY:
        gdc_launch_dependents()
    if TILES[3] > 0:
        sign = meet_programs(counter, sign, patience)
        inputs, partials = _stage(
            next_normed, ROWS, hidden, x_shared, partials, STEPS[3], TURNS[3], SLICES, SPANS, ROWS
        )  # fmt: skip
        parts = _load_squares(following, PROGRAMS, SPANS, ROWS)
        multiply_tiles(
            inputs, partials, _count_tiles(TILES[3]), *ring, fill, total, words, scales,
            STEPS[3], GROUPS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, ROWS,
        )  # fmt: skip
        scale = _scale_of(
            parts, hidden, next_eps, HEIGHT, ROWS, SPANS, gl.SliceLayout(1, WHOLE)
        )  # fmt: skip
        last = _results(partials, 0, TURNS[3], SPANS, HEIGHT, ROWS, WHOLE) * qkv_factors * scale
        gl.store(out + of_qkv[2], last.to(out.dtype.element_ty), mask=of_qkv[1])


hash_functions(globals())
