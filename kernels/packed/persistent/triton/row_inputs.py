"""The input of a product in `hopper_row`: copied to shared memory as a whole, then read by steps.

SUMS is the layout of sums, see `hopper_row_steps`. In the operands' layout a lane has eight numbers
of the input for its eight words.
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
def block_of(values, threads):
    """How many numbers threads load at once: eight each, times a power of 2 that is at most 8."""
    block = 8 * threads
    while block < min(values, 64 * threads):
        block *= 2
    return block


@gluon.jit
def stage_input(
    source, x_shared, size, STEPS: gl.constexpr, SLICES: gl.constexpr, SPANS: gl.constexpr
):  # fmt: skip
    """Copy a row [size], times a factor, to x_shared [VALUES / 64, 64], with zeros after it.
    Returns that as `input_of` reads it.

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


@gluon.constexpr_function
def _copies_layout(spans, slices):
    """The right operand's layout, seen as [SPANS, copies, SLICES, 64] numbers."""
    columns = [
        [0, 0, bit, 0] if bit < slices else [0, bit // slices, 0, 0] for bit in (1, 2, 4)
    ]  # fmt: skip
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 32]],
        lane_bases=[[0, 0, 0, 8], [0, 0, 0, 16], *columns],
        warp_bases=[[1 << bit, 0, 0, 0] for bit in range(spans.bit_length() - 1)],
        block_bases=[],
        shape=[spans, 8 // slices, slices, 64],
    )


@gluon.jit
def input_of(inputs, step, SLICES: gl.constexpr, SUMS: gl.constexpr, SPANS: gl.constexpr):
    """The right operand [SPANS, 64, 8] of a step: column i is slice i of each span. More columns
    than slices are copies, which nothing reads."""
    COPIES: gl.constexpr = _copies_layout(SPANS, SLICES)
    values = inputs.index(step).load(gl.SliceLayout(1, COPIES))
    shape = gl.zeros([SPANS, 8 // SLICES, SLICES, 64], values.dtype, layout=COPIES)
    _, values = gl.broadcast(shape, values[:, None, :, :])
    values = gl.permute(gl.reshape(values, [SPANS, 8, 64]), [0, 2, 1])
    return gl.convert_layout(values, gl.DotOperandLayout(1, SUMS, 8), assert_trivial=True)


hash_functions(globals())
