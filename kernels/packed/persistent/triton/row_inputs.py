"""The input of a product in `hopper_row`: copied to shared memory as a whole, then read by steps.

SUMS is the layout of sums, see `hopper_row_steps`. In the operands' layout a lane has eight numbers
of the input for its eight words.

An operand has eight columns: slices of the only row, or PER slices of each of ROWS rows, a power of
2. The slices of four rows of "int4" take two operands, which OPERANDS counts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....launch import hash_functions

INPUT_FACTOR = gl.constexpr(2.0**60)  # of inputs, see `packed_direct`
# Loads 16 bytes at $4, or zeros if that is null. It bypasses the cache of a multiprocessor, because
# a program loads each number once. $5 to $11 are where the other seven numbers are.
_LOAD = gl.constexpr("""{
.reg .pred p;
setp.ne.u64 p, $4, 0;
mov.u32 $0, 0;
mov.u32 $1, 0;
mov.u32 $2, 0;
mov.u32 $3, 0;
@p ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")


@gluon.jit
def load_eights(pointers, inside):
    """Load numbers of 16 bits, eight neighbours at once, and zeros where not inside."""
    return gl.inline_asm_elementwise(
        _LOAD, "=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l", [gl.where(inside, pointers.to(gl.int64), 0)],
        dtype=pointers.dtype.element_ty, is_pure=False, pack=8,
    )  # fmt: skip


@gluon.constexpr_function
def slices_of_operand(slices, rows):
    """How many slices of each row are in an operand."""
    return min(slices, 8 // rows)


@gluon.constexpr_function
def block_of(values, threads):
    """How many numbers threads load at once: eight each, times a power of 2 that is at most 8."""
    block = 8 * threads
    while block < min(values, 64 * threads):
        block *= 2
    return block


@gluon.constexpr_function
def blocks_of(values, threads):
    """The first number and the size of blocks that threads load at once, see `block_of`. All
    numbers are in a block: the last blocks are smaller."""
    blocks, first, size = (), 0, 64 * threads
    while first < values:
        while size > values - first:
            size //= 2
        blocks += ((first, size),)
        first += size
    return blocks


@gluon.jit
def stage_input(
    source, x_shared, size, STEPS: gl.constexpr, SLICES: gl.constexpr, SPANS: gl.constexpr
):  # fmt: skip
    """Copy a row [size], times a factor, to x_shared [VALUES / 64, 64], with zeros after it.
    Returns that as `operands_of` reads it.

    All warps have left the memory before: they meet for the results of a product.
    """
    STEP: gl.constexpr = SPANS * SLICES * 64
    VALUES: gl.constexpr = x_shared.shape[0] * 64
    BLOCK: gl.constexpr = block_of(STEPS * STEP, 32 * SPANS)
    dtype: gl.constexpr = source.dtype.element_ty
    blocks = x_shared._reinterpret(
        dtype, [VALUES // BLOCK, BLOCK // 64, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [SPANS], [0])
    for i in gl.static_range((STEPS * STEP + BLOCK - 1) // BLOCK):
        at = i * BLOCK + gl.arange(0, BLOCK, layout=layout)
        values = load_eights(source + at, at < size)
        blocks.index(i).store(gl.reshape(values * INPUT_FACTOR, [BLOCK // 64, 64]))
    gl.thread_barrier()
    return x_shared._reinterpret(
        dtype, [VALUES // STEP, SPANS, SLICES, 64], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )  # fmt: skip


@gluon.jit
def _copy_block(
    source, count, size, x_shared, FIRST: gl.constexpr, BLOCK: gl.constexpr,
    VALUES: gl.constexpr, SLICES: gl.constexpr, PER: gl.constexpr, ROWS: gl.constexpr,
    SPANS: gl.constexpr,
):  # fmt: skip
    """Copy BLOCK numbers from FIRST on of x_shared, which has VALUES, see `stage_rows`."""
    COLUMNS: gl.constexpr = ROWS * PER
    OPERANDS: gl.constexpr = SLICES // PER
    at = FIRST + gl.arange(0, BLOCK, layout=gl.BlockedLayout([8], [32], [SPANS], [0]))
    part, column = at // (64 * COLUMNS * SPANS), at // 64 % COLUMNS
    span = part // OPERANDS * SPANS + at // (64 * COLUMNS) % SPANS
    own = span * (SLICES * 64) + (part % OPERANDS * PER + column % PER) * 64 + at % 64
    row = column // PER
    values = load_eights(source + row * size + own, (own < size) & (row < count))
    blocks = x_shared._reinterpret(
        source.dtype.element_ty,
        [VALUES // BLOCK, BLOCK // 64, 64],
        gl.SwizzledSharedLayout(32, 1, 2, [1, 0]),
    )
    blocks.index(FIRST // BLOCK).store(gl.reshape(values * INPUT_FACTOR, [BLOCK // 64, 64]))


@gluon.jit
def stage_rows(
    source, count, size, STEPS: gl.constexpr, SLICES: gl.constexpr, ROWS: gl.constexpr,
    SPANS: gl.constexpr,
):  # fmt: skip
    """Copy rows [count, size], times a factor, to shared memory [steps and operands, SPANS, ROWS *
    PER, 64], with zeros after each row and in place of those that ROWS has beyond `count`. Returns
    it as `operands_of` reads it.

    The next product takes this memory again, because nothing reads it after the product.
    """
    PER: gl.constexpr = slices_of_operand(SLICES, ROWS)
    PARTS: gl.constexpr = STEPS * (SLICES // PER)
    VALUES: gl.constexpr = PARTS * SPANS * PER * ROWS * 64
    BLOCKS: gl.constexpr = blocks_of(VALUES, 32 * SPANS)
    # Neighbouring columns, which lanes read at once, begin in different halves of the banks.
    x_shared = gl.allocate_shared_memory(
        source.dtype.element_ty,
        [PARTS, SPANS, PER * ROWS, 64],
        gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0]),
    )
    for i in gl.static_range(len(BLOCKS)):
        _copy_block(
            source, count, size, x_shared, *BLOCKS[i], VALUES, SLICES, PER, ROWS, SPANS
        )  # fmt: skip
    gl.thread_barrier()
    return x_shared


@gluon.constexpr_function
def _copies_layout(spans, count):
    """The right operand's layout, seen as [SPANS, copies, `count` columns, 64] numbers."""
    columns = [
        [0, 0, bit, 0] if bit < count else [0, bit // count, 0, 0] for bit in (1, 2, 4)
    ]  # fmt: skip
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 32]],
        lane_bases=[[0, 0, 0, 8], [0, 0, 0, 16], *columns],
        warp_bases=[[1 << bit, 0, 0, 0] for bit in range(spans.bit_length() - 1)],
        block_bases=[],
        shape=[spans, 8 // count, count, 64],
    )


@gluon.jit
def _operand_of(values, SUMS: gl.constexpr, COUNT: gl.constexpr, SPANS: gl.constexpr):
    """The right operand [SPANS, 64, 8] of columns [SPANS, COUNT, 64] in shared memory. More columns
    than COUNT are copies, which nothing reads."""
    COPIES: gl.constexpr = _copies_layout(SPANS, COUNT)
    values = values.load(gl.SliceLayout(1, COPIES))
    shape = gl.zeros([SPANS, 8 // COUNT, COUNT, 64], values.dtype, layout=COPIES)
    _, values = gl.broadcast(shape, values[:, None, :, :])
    values = gl.permute(gl.reshape(values, [SPANS, 8, 64]), [0, 2, 1])
    return gl.convert_layout(values, gl.DotOperandLayout(1, SUMS, 8), assert_trivial=True)


@gluon.jit
def operands_of(
    inputs, step, SLICES: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr
):  # fmt: skip
    """The right operands of a step, a tuple of OPERANDS. Column r * PER + i of the j-th is slice
    j * PER + i of row r."""
    PER: gl.constexpr = slices_of_operand(SLICES, ROWS)
    OPERANDS: gl.constexpr = SLICES // PER
    found = ()
    for i in gl.static_range(OPERANDS):
        found += (_operand_of(inputs.index(step * OPERANDS + i), SUMS, PER * ROWS, SPANS),)
    return found


hash_functions(globals())
