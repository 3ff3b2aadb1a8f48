"""The roles of warps in the products between two attentions, for one row; see `hopper_row`.

A product is (words, scales, factors of whole rows, N, zeros). The words are a descriptor of [spans,
blocks, 8, 64], or of [spans, 2, N, 64] of gate and up; the scales of [groups, blocks, 8], or of
[groups, 2, N]; the zeros of [groups, rows].

A step of the rings holds SPANS spans of 16 weight rows: w_ring [STAGES, SPANS, 2, 8, 64] int16,
s_ring [STAGES, SPANS * GROUPS, 2, 8], and z_ring [STAGES * 2, SPANS * GROUPS, 16] uint8, a box of
zeros for each block, of which the second half belongs to other rows. Each stage has barriers that
tell when it is full and when it is empty.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....launch import hash_functions
from .hopper_row_steps import HEIGHT, add_step, excess_of, halves, input_of, take, total_of
from .meet_programs import meet_programs

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _copy_tiles(
    product, w_ring, s_ring, z_ring, full, empty, fill, tiles,
    STEPS: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, FLYING: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = SPANS * HEIGHT * (128 + GROUPS * (4 if ZEROS else 2))
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, row, first, second = tile * 2, 0, tile * HEIGHT, tile * HEIGHT + 8
        if GATED:
            block, row, first, second = 0, tile * 8, tile * 8, tile * 8 + product[3]
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
            if ZEROS:
                group = step * (SPANS * GROUPS)
                tma.async_copy_global_to_shared(
                    product[4], [group, first], ready, z_ring.index(slot * 2)
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    product[4], [group, second], ready, z_ring.index(slot * 2 + 1)
                )  # fmt: skip
            fill += 1
    return fill


@gluon.jit
def bring_words(
    o, gate_up, down, qkv, w_ring, s_ring, z_ring, full, empty,
    TILES: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, FLYING: gl.constexpr,
):  # fmt: skip
    """The producer: copies the words and scales of all products, as far ahead as there is memory.

    No kernel writes them, so it waits for nothing else. At most FLYING steps are on their way, or
    what other warps read would queue behind them.
    """
    ring = w_ring, s_ring, z_ring, full, empty
    fill = 0  # steps copied
    fill = _copy_tiles(
        o, *ring, fill, TILES[0], STEPS[0], False, GROUPS, ZEROS, SPANS, STAGES, FLYING
    )  # fmt: skip
    fill = _copy_tiles(
        gate_up, *ring, fill, TILES[1], STEPS[1], True, GROUPS, ZEROS, SPANS, STAGES, FLYING
    )  # fmt: skip
    fill = _copy_tiles(
        down, *ring, fill, TILES[2], STEPS[2], False, GROUPS, ZEROS, SPANS, STAGES, FLYING
    )  # fmt: skip
    if TILES[3] > 0:
        _copy_tiles(
            qkv, *ring, fill, TILES[3], STEPS[3], False, GROUPS, ZEROS, SPANS, STAGES, FLYING
        )  # fmt: skip


@gluon.jit
def _keep(
    kept, source, tiles, num_outputs,
    TURNS: gl.constexpr, GATED: gl.constexpr, SPANS: gl.constexpr,
):  # fmt: skip
    """Load what belongs to the weight rows of this program's tiles into kept [TURNS, HEIGHT].

    All at once, because a load behind words on their way takes as long as these.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [SPANS, 1], [1, 0])
    turn = gl.arange(0, TURNS, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, layout))
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    if GATED:
        n = tile[:, None] * 8 + (row % 8 + row // 8 * num_outputs)[None, :]
    else:
        n = tile[:, None] * HEIGHT + row[None, :]
    inside = gl.broadcast((tile < tiles)[:, None], n)[0]
    values = gl.load(source + n, mask=inside, other=0.0).to(gl.float32)
    whole = kept._reinterpret(
        gl.float32, [TURNS, HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    whole.store(values)


@gluon.jit
def _norm_scale(squares, size, eps, PROGRAMS: gl.constexpr, SPANS: gl.constexpr):
    """What a norm multiplies its row by, from the sums of squares of all programs."""
    each = gl.arange(0, PROGRAMS, layout=gl.BlockedLayout([1], [32], [SPANS], [0]))
    own = gl.load(squares + each, mask=each < gl.num_programs(0), other=0.0)
    return gl.rsqrt(gl.sum(own, 0) / size + eps)


@gluon.jit
def _multiply(
    product, x, size, squares, eps, out, normed, factors, gains, streams, tiles,
    w_tiles, s_tiles, z_tiles, full, empty, fill, total, words, scales,
    STEPS: gl.constexpr, MODE: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SLICES: gl.constexpr, FACTORS: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of a product with x [size]; of modes 0 and 1, with the norm of
    x, which has its weight already.

    MODE 0: store the sums; 1: store silu(gate) * up; 2 and 3: add the sums to the stream, and store
    it times the norm's weight; 3: store it, too. `factors`, `gains` and `streams` hold the factors
    of whole rows, the norm's weight and the stream at this program's tiles. `words` and `scales`
    are those of step `fill` of `total`; the next ones are loaded while these are multiplied.
    Returns the same for the next step, and [HEIGHT] sums of squares of the stream. The inputs of
    up to HELD steps stay in registers.
    """
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SUMS))
    dtype: gl.constexpr = out.dtype.element_ty
    none = gl.zeros([SPANS, HEIGHT, 8], gl.float32, layout=SUMS)
    row = gl.arange(0, HEIGHT, layout=ROWS)
    added = gl.zeros([HEIGHT], gl.float32, layout=ROWS)
    first = input_of(x, 0, size, SLICES, SUMS, SPANS)
    xs = (first,)
    excesses = (excess_of(first, GROUPS, ZEROS, SUMS, SPANS),)
    if STEPS <= HELD:
        for step in gl.static_range(1, STEPS):
            xs += (input_of(x, step, size, SLICES, SUMS, SPANS),)
            excesses += (excess_of(xs[step], GROUPS, ZEROS, SUMS, SPANS),)
    scale = 1.0
    if MODE < 2:
        scale = _norm_scale(squares, size, eps, PROGRAMS, SPANS)
    for turn in range(_count_tiles(tiles)):
        sums = none, none, none, none
        if SLICES == 2:
            sums = none, none
        if SLICES == 1:
            sums = (none,)
        if STEPS <= HELD:
            for step in gl.static_range(STEPS):
                now, now_scales = words, scales
                fill += 1
                words, scales = take(
                    w_tiles, s_tiles, z_tiles, full, empty, fill, total,
                    GROUPS, ZEROS, SUMS, SPANS, STAGES,
                )  # fmt: skip
                sums = add_step(
                    sums, now, now_scales, xs[step], excesses[step], GROUPS, ZEROS, SLICES
                )
        else:
            x_now = first
            for step in range(STEPS):
                now, now_scales = words, scales
                fill += 1
                words, scales = take(
                    w_tiles, s_tiles, z_tiles, full, empty, fill, total,
                    GROUPS, ZEROS, SUMS, SPANS, STAGES,
                )  # fmt: skip
                x_next = input_of(x, step + 1, size, SLICES, SUMS, SPANS)
                even = excess_of(x_now, GROUPS, ZEROS, SUMS, SPANS)
                sums = add_step(sums, now, now_scales, x_now, even, GROUPS, ZEROS, SLICES)
                x_now = x_next
        y = total_of(sums, SLICES, FACTORS, SUMS) * scale
        if SLICES == 2:
            y = y * factors.index(turn).load(ROWS)
        tile = gl.program_id(0) + turn * gl.num_programs(0)
        n = tile * HEIGHT + row
        if MODE == 1:
            gate, up = halves(y)
            own, below = halves(tile * 8 + row)
            gl.store(out + own, (gate / (1.0 + gl.exp2(-LOG2E * gate)) * up).to(dtype))
        elif MODE == 0:
            gl.store(out + n, y.to(dtype))
        else:
            stream = (y + streams.index(turn).load(ROWS)).to(dtype)
            if MODE == 3:
                gl.store(out + n, stream)
            wide = stream.to(gl.float32)
            streams.index(turn).store(wide)
            added += wide * wide
            gl.store(normed + n, (wide * gains.index(turn).load(ROWS)).to(dtype))
    return fill, words, scales, added


@gluon.jit
def _count_tiles(tiles):
    """The tiles of this program."""
    programs = gl.num_programs(0)
    return (tiles + programs - 1 - gl.program_id(0)) // programs


@gluon.jit
def multiply_all(
    o, gate_up, down, qkv, x, residual, gain, normed, inner, next_gain, stream, next_normed,
    out, squares, counter, eps, next_eps, patience, w_ring, s_ring, z_ring, full, empty,
    o_factors, gate_up_factors, down_factors, qkv_factors, gains, next_gains, streams,
    TILES: gl.constexpr, STEPS: gl.constexpr, TURNS: gl.constexpr, GROUPS: gl.constexpr,
    ZEROS: gl.constexpr, SLICES: gl.constexpr, FACTORS: gl.constexpr, SIZES: gl.constexpr,
    PROGRAMS: gl.constexpr, SPANS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    SCALE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The consumer, of as many warps as a step has spans: computes one product after the other."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPANS, 1, 1], [1, 16, 8])
    w_tiles = w_ring._reinterpret(
        gl.int16, [STAGES, SPANS, HEIGHT, 64], gl.NVMMASharedLayout(128, 16, 3)
    )  # fmt: skip
    s_tiles = s_ring
    if GROUPS > 0:
        s_tiles = s_ring._reinterpret(
            SCALE, [STAGES, SPANS, GROUPS * HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )  # fmt: skip
    z_tiles = z_ring
    if ZEROS:
        z_tiles = z_ring._reinterpret(
            gl.uint8, [STAGES * 2, SPANS, GROUPS * HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )  # fmt: skip
    ring = w_tiles, s_tiles, z_tiles, full, empty
    program = gl.program_id(0)
    hidden = SIZES[1]
    total = 0
    for i in gl.static_range(4):
        total += _count_tiles(TILES[i]) * STEPS[i]
    _keep(gains, gain, TILES[0], 0, TURNS[0], False, SPANS)
    _keep(next_gains, next_gain, TILES[2], 0, TURNS[2], False, SPANS)
    if SLICES == 2:
        _keep(o_factors, o[2], TILES[0], 0, TURNS[0], False, SPANS)
        _keep(gate_up_factors, gate_up[2], TILES[1], gate_up[3], TURNS[1], True, SPANS)
        _keep(down_factors, down[2], TILES[2], 0, TURNS[2], False, SPANS)
        _keep(qkv_factors, qkv[2], TILES[3], 0, TURNS[3], False, SPANS)
    fill = 0  # steps multiplied
    words, scales = take(*ring, fill, total, GROUPS, ZEROS, SUMS, SPANS, STAGES)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    _keep(streams, residual, TILES[0], 0, TURNS[0], False, SPANS)
    fill, words, scales, own = _multiply(
        o, x, SIZES[0], squares, eps, normed, normed, o_factors, gains, streams, TILES[0],
        *ring, fill, total, words, scales,
        STEPS[0], 2, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
    )  # fmt: skip
    gl.store(squares + program, gl.sum(own, 0))
    meet_programs(counter, patience)
    fill, words, scales, none = _multiply(
        gate_up, normed, hidden, squares, eps, inner, inner, gate_up_factors, gains, streams,
        TILES[1], *ring, fill, total, words, scales,
        STEPS[1], 1, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
    )  # fmt: skip
    meet_programs(counter, patience)
    fill, words, scales, own = _multiply(
        down, inner, SIZES[2], squares, eps, stream, next_normed, down_factors, next_gains, streams,
        TILES[2], *ring, fill, total, words, scales,
        STEPS[2], 3, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
    )  # fmt: skip
    if PDL and not EARLY:
        gdc_launch_dependents()
    if TILES[3] > 0:
        following = squares + PROGRAMS
        gl.store(following + program, gl.sum(own, 0))
        meet_programs(counter, patience)
        _multiply(
            qkv, next_normed, hidden, following, next_eps, out, out, qkv_factors, gains, streams,
            TILES[3], *ring, fill, total, words, scales,
            STEPS[3], 0, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
        )  # fmt: skip


hash_functions(globals())
