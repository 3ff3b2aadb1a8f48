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
# Only one lane copies, as the others would copy the same.
FETCH = gl.constexpr("""{
.reg .pred p; .reg .b32 lane;
mov.u32 lane, %laneid;
setp.eq.u32 p, lane, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}""")


@gluon.jit
def _copy_tiles(
    product, w_ring, s_ring, z_ring, full, empty, fill, tiles,
    STEPS: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr,
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
def fetch(pointer, size):
    """Copy bytes, a multiple of 16, to L2."""
    gl.inline_asm_elementwise(
        FETCH, "=r,l,r", [pointer, size], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fetch_tiles(words, num_outputs, tiles, FIRST: gl.constexpr, COUNT: gl.constexpr,
                 WIDTH: gl.constexpr):  # fmt: skip
    """Copy words of gate and up, WIDTH a row, to L2: COUNT of this program's tiles from its FIRST
    on."""
    for turn in gl.static_range(COUNT):
        tile = gl.program_id(0) + (FIRST + turn) * gl.num_programs(0)
        if tile < tiles:
            at = words + gl.cast(tile, gl.int64) * (8 * WIDTH)
            fetch(at, 8 * WIDTH * 2)
            fetch(at + gl.cast(num_outputs, gl.int64) * WIDTH, 8 * WIDTH * 2)


@gluon.jit
def bring_words(
    o, gate_up, down, qkv, w_ring, s_ring, z_ring, full, empty,
    TILES: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SPANS: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, FETCHED: gl.constexpr,
):  # fmt: skip
    """The producer: copies the words and scales of all products, as far ahead as there is memory.

    No kernel writes them, so it waits for nothing else. The first tiles that do not fit into shared
    memory are copied to L2, because the first product may have to wait for attention.
    """
    ring = w_ring, s_ring, z_ring, full, empty
    _fetch_tiles(gate_up[5], gate_up[3], TILES[1], FIRST, FETCHED, STEPS[1] * SPANS * 64)
    fill = 0  # steps copied
    fill = _copy_tiles(o, *ring, fill, TILES[0], STEPS[0], False, GROUPS, ZEROS, SPANS, STAGES)
    fill = _copy_tiles(gate_up, *ring, fill, TILES[1], STEPS[1], True, GROUPS, ZEROS, SPANS, STAGES)
    fill = _copy_tiles(down, *ring, fill, TILES[2], STEPS[2], False, GROUPS, ZEROS, SPANS, STAGES)
    if TILES[3] > 0:
        _copy_tiles(qkv, *ring, fill, TILES[3], STEPS[3], False, GROUPS, ZEROS, SPANS, STAGES)


@gluon.jit
def _norm_scale(squares, size, eps, PROGRAMS: gl.constexpr, SPANS: gl.constexpr):
    """What a norm multiplies its row by, from the sums of squares of all programs."""
    each = gl.arange(0, PROGRAMS, layout=gl.BlockedLayout([1], [32], [SPANS], [0]))
    own = gl.load(squares + each, mask=each < gl.num_programs(0), other=0.0)
    return gl.rsqrt(gl.sum(own, 0) / size + eps)


@gluon.jit
def _multiply(
    product, x, size, squares, eps, out, residual, gain, normed, tiles,
    w_tiles, s_tiles, z_tiles, full, empty, fill, total, words, scales,
    STEPS: gl.constexpr, MODE: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SLICES: gl.constexpr,
    FACTORS: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of a product with x [size]; of modes 0 and 1, with the norm of
    x, which has its weight already.

    MODE 0: store the sums; 1: store silu(gate) * up; 2: store what is residual + the sums, and that
    times the norm's weight. `words` and `scales` are those of step `fill` of `total`; the next ones
    are loaded while these are multiplied. Returns the same for the next step, and [HEIGHT] sums of
    squares of what mode 2 stored. The inputs of up to HELD steps stay in registers.
    """
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SUMS))
    channel, num_outputs = product[2], product[3]
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
    if MODE != 2:
        scale = _norm_scale(squares, size, eps, PROGRAMS, SPANS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n = tile * HEIGHT + row
        if MODE == 1:
            n = tile * 8 + row % 8 + row // 8 * num_outputs
        factor = gl.full([HEIGHT], 1.0, gl.float32, layout=ROWS)
        if GROUPS == 0:
            factor = gl.load(channel + n).to(gl.float32)
        before, weight = factor, factor
        if MODE == 2:
            before = gl.load(residual + n).to(gl.float32)
            weight = gl.load(gain + n).to(gl.float32)
        sums = none, none, none, none
        if GROUPS == 0:
            sums = none, none
        if STEPS <= HELD:
            for step in gl.static_range(STEPS):
                now, now_scales = words, scales
                fill += 1
                words, scales = take(
                    w_tiles, s_tiles, z_tiles, full, empty, fill, total,
                    GROUPS, ZEROS, SUMS, SPANS, STAGES,
                )  # fmt: skip
                sums = add_step(sums, now, now_scales, xs[step], excesses[step], GROUPS, ZEROS)
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
                sums = add_step(sums, now, now_scales, x_now, even, GROUPS, ZEROS)
                x_now = x_next
        y = total_of(sums, SLICES, FACTORS, SUMS) * factor * scale
        if MODE == 1:
            gate, up = halves(y)
            own, below = halves(n)
            gl.store(out + own, (gate / (1.0 + gl.exp2(-LOG2E * gate)) * up).to(dtype))
        elif MODE == 2:
            stream = (y + before).to(dtype)
            gl.store(out + n, stream)
            wide = stream.to(gl.float32)
            added += wide * wide
            gl.store(normed + n, (wide * weight).to(dtype))
        else:
            gl.store(out + n, y.to(dtype))
    return fill, words, scales, added


@gluon.jit
def _count_steps(TILES: gl.constexpr, STEPS: gl.constexpr):
    """The steps of this program in all products."""
    total = 0
    programs, program = gl.num_programs(0), gl.program_id(0)
    for i in gl.static_range(4):
        total += (TILES[i] + programs - 1 - program) // programs * STEPS[i]
    return total


@gluon.jit
def multiply_all(
    o, gate_up, down, qkv, x, residual, gain, middle, normed, inner, next_gain, stream, next_normed,
    out, squares, counter, eps, next_eps, patience, w_ring, s_ring, z_ring, full, empty,
    TILES: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, ZEROS: gl.constexpr,
    SLICES: gl.constexpr,
    FACTORS: gl.constexpr, SIZES: gl.constexpr, PROGRAMS: gl.constexpr, SPANS: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, SCALE: gl.constexpr, EARLY: gl.constexpr,
    PDL: gl.constexpr,
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
    total = _count_steps(TILES, STEPS)
    fill = 0  # steps multiplied
    words, scales = take(*ring, fill, total, GROUPS, ZEROS, SUMS, SPANS, STAGES)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    fill, words, scales, own = _multiply(
        o, x, SIZES[0], squares, eps, middle, residual, gain, normed, TILES[0], *ring,
        fill, total, words, scales,
        STEPS[0], 2, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
    )  # fmt: skip
    gl.store(squares + program, gl.sum(own, 0))
    meet_programs(counter, patience)
    fill, words, scales, none = _multiply(
        gate_up, normed, hidden, squares, eps, inner, inner, inner, inner, TILES[1], *ring,
        fill, total, words, scales,
        STEPS[1], 1, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
    )  # fmt: skip
    meet_programs(counter, patience)
    fill, words, scales, own = _multiply(
        down, inner, SIZES[2], squares, eps, stream, middle, next_gain, next_normed, TILES[2],
        *ring, fill, total, words, scales,
        STEPS[2], 2, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
    )  # fmt: skip
    if PDL and not EARLY:
        gdc_launch_dependents()
    if TILES[3] > 0:
        following = squares + PROGRAMS
        gl.store(following + program, gl.sum(own, 0))
        meet_programs(counter, patience)
        _multiply(
            qkv, next_normed, hidden, following, next_eps, out, out, out, out, TILES[3], *ring,
            fill, total, words, scales,
            STEPS[3], 0, GROUPS, ZEROS, SLICES, FACTORS, SUMS, SPANS, STAGES, HELD, PROGRAMS,
        )  # fmt: skip


hash_functions(globals())
