"""The roles of warps in the products between two attentions, for one row; see `hopper_row`.

A product is (words, scales, factors of whole rows, N): descriptors of the words [spans, blocks, 8,
64] and of the scales [groups, blocks, 8], or [spans, 2, N, 64] and [groups, 2, N] of gate and up.
A step of the rings holds SPANS spans of 16 weight rows: w_ring [STAGES, SPANS, 2, 8, 64] int16 and
s_ring [STAGES, SPANS * GROUPS, 2, 8]. Each stage has barriers that tell when it is full and when
it is empty.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....launch import hash_functions
from ....quant.triton import packed_codes

SPANS = gl.constexpr(8)  # of a step; each of the consumer's warps multiplies one
HEIGHT = gl.constexpr(16)  # weight rows of a tile; 8 of gate and 8 of up
INPUT_FACTOR = gl.constexpr(2.0**60)  # of inputs, see `packed_direct`
LOG2E = gl.constexpr(1.4426950408889634)
MASKED_4 = gl.constexpr(packed_codes.MASKED_4.value)
MASKED_8 = gl.constexpr(packed_codes.MASKED_FP8_BF16.value)

SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
# A lane has 16 bytes of a row: eight words, and eight numbers of the input for them.
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS, 8))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SUMS, 8))
ROWS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))

# Thread 0 adds to a counter and waits until its highest bit changes: all programs but the first add
# 1, and the first one adds what is missing to 2 ** 31, so that nobody has to reset it. $1: the
# counter, $2: what is added, $3: after how many times 1024 cycles the kernel fails.
_MEET = gl.constexpr("""{
.reg .pred p; .reg .b32 thread, old, now; .reg .b64 begin, clock, limit;
mov.u32 thread, %tid.x;
setp.ne.u32 p, thread, 0;
@p bra MET;
mov.u64 begin, %clock64;
cvt.u64.u32 limit, $3;
shl.b64 limit, limit, 10;
atom.acq_rel.gpu.global.add.u32 old, [$1], $2;
WAIT:
ld.acquire.gpu.global.u32 now, [$1];
xor.b32 now, now, old;
setp.lt.s32 p, now, 0;
@p bra MET;
mov.u64 clock, %clock64;
sub.u64 clock, clock, begin;
setp.lt.u64 p, clock, limit;
@p bra WAIT;
trap;
MET:
mov.u32 $0, 0;
}""")

# Only one lane copies, as the others would copy the same.
FETCH = gl.constexpr("""{
.reg .pred p; .reg .b32 lane;
mov.u32 lane, %laneid;
setp.eq.u32 p, lane, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}""")


@gluon.jit
def meet_programs(counter, patience):
    """Wait until all programs are here. What they stored before is visible afterwards."""
    gl.thread_barrier()
    added = 1
    if gl.program_id(0) == 0:
        added = -0x80000000 - (gl.num_programs(0) - 1)
    gl.inline_asm_elementwise(
        _MEET, "=r,l,r,r", [counter, added, patience], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()


@gluon.jit
def _copy_tiles(
    product, w_ring, s_ring, full, empty, fill, tiles,
    STEPS: gl.constexpr, GATED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
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
def fetch(pointer, size):
    """Copy bytes, a multiple of 16, to L2."""
    gl.inline_asm_elementwise(
        FETCH, "=r,l,r", [pointer, size], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fetch_tiles(words, num_outputs, tiles, FIRST: gl.constexpr, COUNT: gl.constexpr,
                 STEPS: gl.constexpr):  # fmt: skip
    """Copy words of gate and up to L2: COUNT of this program's tiles from its FIRST on."""
    WIDTH: gl.constexpr = STEPS * SPANS * 64  # of a row
    for turn in gl.static_range(COUNT):
        tile = gl.program_id(0) + (FIRST + turn) * gl.num_programs(0)
        if tile < tiles:
            at = words + gl.cast(tile, gl.int64) * (8 * WIDTH)
            fetch(at, 8 * WIDTH * 2)
            fetch(at + gl.cast(num_outputs, gl.int64) * WIDTH, 8 * WIDTH * 2)


@gluon.jit
def bring_words(
    o, gate_up, down, qkv, w_ring, s_ring, full, empty,
    TILES: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    FIRST: gl.constexpr, FETCHED: gl.constexpr,
):  # fmt: skip
    """The producer: copies the words and scales of all products, as far ahead as there is memory.

    No kernel writes them, so it waits for nothing else. The first tiles that do not fit into shared
    memory are copied to L2, because the first product may have to wait for attention.
    """
    ring = w_ring, s_ring, full, empty
    _fetch_tiles(gate_up[4], gate_up[3], TILES[1], FIRST, FETCHED, STEPS[1])
    fill = 0  # steps copied
    fill = _copy_tiles(o, *ring, fill, TILES[0], STEPS[0], False, GROUPS, STAGES)
    fill = _copy_tiles(gate_up, *ring, fill, TILES[1], STEPS[1], True, GROUPS, STAGES)
    fill = _copy_tiles(down, *ring, fill, TILES[2], STEPS[2], False, GROUPS, STAGES)
    if TILES[3] > 0:
        _copy_tiles(qkv, *ring, fill, TILES[3], STEPS[3], False, GROUPS, STAGES)


@gluon.jit
def _input(x, step, size, SLICES: gl.constexpr):
    """The right operand [SPANS, 64, 8] of a step: column i is slice i of each span. More columns
    than slices are copies, which nothing reads."""
    span = step * SPANS + gl.arange(0, SPANS, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    slices = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))) % SLICES
    at = span[:, None, None] * (64 * SLICES) + slices[None, None, :] * 64
    values = gl.load(x + (at + k[None, :, None]), mask=at < size, other=0.0)
    return values * INPUT_FACTOR


@gluon.jit
def _take(w_tiles, s_tiles, full, empty, fill, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Load the words and the scales of a step, and release its memory."""
    slot, phase = fill % STAGES, (fill // STAGES) & 1
    mbarrier.wait(full.index(slot), phase)
    words = w_tiles.index(slot).load(LEFT)
    scales = ()
    for g in gl.static_range(GROUPS):
        own = s_tiles.index(slot).slice(g * HEIGHT, HEIGHT, 1)
        scales += (own.load(gl.SliceLayout(2, SUMS)).to(gl.float32)[:, :, None],)
    mbarrier.arrive(empty.index(slot), count=1)
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
def minus_eight():
    """The zero of "int4", negative, as a tile of such tiny floats of an even slice."""
    bits = gl.full([SPANS, HEIGHT, 64], -0x7FF8, gl.int16, layout=LEFT)
    return bits.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _excess(x, GROUPS: gl.constexpr):
    """The product of a step's input with the zero of "int4", negative, for even slices."""
    excess = gl.zeros([SPANS, HEIGHT, 8], gl.float32, layout=SUMS)
    if GROUPS > 0:
        excess = mma_v2(minus_eight(), x, excess)
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
            added += (sums[i] + part * scales[i * GROUPS // 4],)
    else:
        tiles = masked_8(words)
        for i in gl.static_range(2):
            added += (mma_v2(tiles[i], x, sums[i]),)
    return added


@gluon.jit
def _total(sums, SLICES: gl.constexpr, FACTORS: gl.constexpr):
    """The sums [HEIGHT] of all slices and spans: column i of the i-th."""
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
    total = gl.where(column == 0, sums[0] * FACTORS[0], 0.0)
    for i in gl.static_range(1, SLICES):
        total += gl.where(column == i, sums[i] * FACTORS[i], 0.0)
    return gl.sum(gl.sum(total, 2), 0)


@gluon.jit
def _halves(values):
    """The values of the first and of the second 8 rows of a tile."""
    return gl.split(gl.permute(gl.reshape(values, [2, 8]), (1, 0)))


@gluon.jit
def _multiply(
    product, x, size, scale, out, residual, gain, normed, tiles,
    w_tiles, s_tiles, full, empty, fill,
    STEPS: gl.constexpr, MODE: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr,
    FACTORS: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of a product with x [size], times `scale`.

    MODE 0: store the sums; 1: store silu(gate) * up; 2: store what is residual + the sums, and that
    times the norm's weight. Returns the steps taken, and [HEIGHT] sums of squares of what mode 2
    stored. The inputs of up to HELD steps stay in registers.
    """
    channel, num_outputs = product[2], product[3]
    dtype: gl.constexpr = out.dtype.element_ty
    none = gl.zeros([SPANS, HEIGHT, 8], gl.float32, layout=SUMS)
    row = gl.arange(0, HEIGHT, layout=ROWS)
    squares = gl.zeros([HEIGHT], gl.float32, layout=ROWS)
    first = _input(x, 0, size, SLICES)
    first_excess = _excess(first, GROUPS)
    xs, excesses = (first,), (first_excess,)
    if STEPS <= HELD:
        for step in gl.static_range(1, STEPS):
            xs += (_input(x, step, size, SLICES),)
            excesses += (_excess(xs[step], GROUPS),)
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
                words, scales = _take(w_tiles, s_tiles, full, empty, fill, GROUPS, STAGES)
                sums = _add_step(sums, words, scales, xs[step], excesses[step], GROUPS)
                fill += 1
        else:
            x_now = first
            for step in range(STEPS):
                words, scales = _take(w_tiles, s_tiles, full, empty, fill, GROUPS, STAGES)
                x_next = _input(x, step + 1, size, SLICES)
                sums = _add_step(sums, words, scales, x_now, _excess(x_now, GROUPS), GROUPS)
                x_now = x_next
                fill += 1
        y = _total(sums, SLICES, FACTORS) * factor * scale
        if MODE == 1:
            gate, up = _halves(y)
            own, below = _halves(n)
            gl.store(out + own, (gate / (1.0 + gl.exp2(-LOG2E * gate)) * up).to(dtype))
        elif MODE == 2:
            stream = (y + before).to(dtype)
            gl.store(out + n, stream)
            wide = stream.to(gl.float32)
            squares += wide * wide
            gl.store(normed + n, (wide * weight).to(dtype))
        else:
            gl.store(out + n, y.to(dtype))
    return fill, squares


@gluon.jit
def _norm_scale(squares, size, eps, PROGRAMS: gl.constexpr):
    """What a norm multiplies its row by, from the sums of squares of all programs."""
    each = gl.arange(0, PROGRAMS, layout=gl.BlockedLayout([1], [32], [8], [0]))
    own = gl.load(squares + each, mask=each < gl.num_programs(0), other=0.0)
    return gl.rsqrt(gl.sum(own, 0) / size + eps)


@gluon.jit
def multiply_all(
    o, gate_up, down, qkv, x, residual, gain, middle, normed, inner, next_gain, stream, next_normed,
    out, squares, counter, eps, next_eps, patience, w_ring, s_ring, full, empty,
    TILES: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, SLICES: gl.constexpr,
    FACTORS: gl.constexpr, SIZES: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, SCALE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The consumer, of as many warps as a step has spans: computes one product after the other."""
    w_tiles = w_ring._reinterpret(
        gl.int16, [STAGES, SPANS, HEIGHT, 64], gl.NVMMASharedLayout(128, 16, 3)
    )  # fmt: skip
    s_tiles = s_ring
    if GROUPS > 0:
        s_tiles = s_ring._reinterpret(
            SCALE, [STAGES, SPANS, GROUPS * HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )  # fmt: skip
    ring = w_tiles, s_tiles, full, empty
    program = gl.program_id(0)
    hidden = SIZES[1]
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    fill = 0  # steps multiplied
    fill, own = _multiply(
        o, x, SIZES[0], 1.0, middle, residual, gain, normed, TILES[0], *ring, fill,
        STEPS[0], 2, GROUPS, SLICES, FACTORS, STAGES, HELD,
    )  # fmt: skip
    gl.store(squares + program, gl.sum(own, 0))
    meet_programs(counter, patience)
    scale = _norm_scale(squares, hidden, eps, PROGRAMS)
    fill, none = _multiply(
        gate_up, normed, hidden, scale, inner, inner, inner, inner, TILES[1], *ring, fill,
        STEPS[1], 1, GROUPS, SLICES, FACTORS, STAGES, HELD,
    )  # fmt: skip
    meet_programs(counter, patience)
    fill, own = _multiply(
        down, inner, SIZES[2], 1.0, stream, middle, next_gain, next_normed, TILES[2], *ring, fill,
        STEPS[2], 2, GROUPS, SLICES, FACTORS, STAGES, HELD,
    )  # fmt: skip
    if PDL and not EARLY:
        gdc_launch_dependents()
    if TILES[3] > 0:
        gl.store(squares + PROGRAMS + program, gl.sum(own, 0))
        meet_programs(counter, patience)
        scale = _norm_scale(squares + PROGRAMS, hidden, next_eps, PROGRAMS)
        _multiply(
            qkv, next_normed, hidden, scale, out, out, out, out, TILES[3], *ring, fill,
            STEPS[3], 0, GROUPS, SLICES, FACTORS, STAGES, HELD,
        )  # fmt: skip


hash_functions(globals())
