"""How programs of a launch exchange rows without a barrier: each value shows that it is there.

Memory for values that have not arrived holds only ones. As a float of 16 or 32 bits this is a NaN
that no instruction returns: results that are not numbers are 0x7FFF and 0x7FFFFFFF. So a value of
other bits has arrived, and no order of two accesses to memory matters. Stores and loads are relaxed
and of the whole GPU: they bypass the cache of a multiprocessor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....launch import hash_functions

# What ends a loop that waits: p is whether something is missing. An instruction in which a number
# of cycles is over fails.
_AGAIN = """@!p bra ARRIVED;
mov.u64 clock, %clock64;
sub.u64 clock, clock, begin;
setp.lt.u64 p, clock, limit;
@p bra AGAIN;
trap;
ARRIVED:
}"""
_BEGIN = """{
.reg .pred p; .reg .b32 t; .reg .b64 begin, clock, limit;
mov.u64 begin, %%clock64;
cvt.u64.u32 limit, $%d;
shl.b64 limit, limit, 10;
"""


@gluon.constexpr_function
def _text(chunks, waits):
    """Assembly that loads some chunks of eight values. It loads again what is missing.

    Operands: the words of all chunks, pointers to all values (null = zeros), patience.
    """
    words = [[f"${4 * i + j}" for j in range(4)] for i in range(chunks)]
    pointers = [f"${4 * chunks + 8 * i}" for i in range(chunks)]
    lines = [_BEGIN % (12 * chunks)]
    for i in range(chunks):
        lines += [f".reg .pred q{i}; .reg .b32 u{i};", f"setp.ne.u64 q{i}, {pointers[i]}, 0;"]
        lines += [f"mov.u32 {word}, 0;" for word in words[i]]
    lines.append("AGAIN:")
    for i in range(chunks):
        target = ", ".join(words[i])
        lines.append(f"@q{i} ld.relaxed.gpu.global.v4.b32 {{{target}}}, [{pointers[i]}];")
    lines.append("setp.ne.u32 p, 0, 0;")
    for i in range(chunks if waits else 0):
        lines.append(f"mov.u32 u{i}, 0;")
        for word in words[i]:  # the highest bit of a half of ones that is the lowest such
            lines += [f"not.b32 t, {word};", "sub.u32 t, t, 0x00010001;"]
            lines += [f"and.b32 t, t, {word};", f"or.b32 u{i}, u{i}, t;"]
        lines += [f"and.b32 u{i}, u{i}, 0x80008000;", f"setp.ne.u32 q{i}, u{i}, 0;"]
        lines.append(f"or.pred p, p, q{i};")
    return "\n".join([*lines, _AGAIN])


@gluon.constexpr_function
def _operands(chunks):
    """The constraints of the operands of `_text`; each value has a patience, too."""
    return ",".join(["=&r"] * (4 * chunks) + ["l"] * (8 * chunks) + ["r"] * (8 * chunks))


@gluon.constexpr_function
def _chunks_of(values, threads):
    """How many chunks of 8 values a thread loads at once: a power of 2, at most 8."""
    chunks = 1
    while chunks < 8 and chunks * 8 * threads < values:
        chunks *= 2
    return chunks


_CONFIRM = gl.constexpr(
    _BEGIN % 3
    + """mov.u32 $0, $1;
AGAIN:
setp.eq.u32 p, $0, 0xFFFFFFFF;
@p ld.relaxed.gpu.global.b32 $0, [$2];
"""
    + _AGAIN
)
_PUBLISH = """{
.reg .pred p;
setp.ne.u32 p, $3, 0;
@p st.relaxed.gpu.global.%s [$1], $2;
mov.u32 $0, 0;
}"""
_PUBLISH_16 = gl.constexpr(_PUBLISH % "b16")
_PUBLISH_32 = gl.constexpr(_PUBLISH % "b32")


@gluon.jit
def arrived(pointers, inside, patience, CHUNKS: gl.constexpr, WAITS: gl.constexpr):
    """Load values of 16 bits, CHUNKS times eight neighbours a thread, zeros where not inside.

    With WAITS, wait until all are there."""
    sources = gl.where(inside, pointers.to(gl.int64), 0)
    return gl.inline_asm_elementwise(
        _text(CHUNKS, WAITS), _operands(CHUNKS), [sources, patience],
        dtype=pointers.dtype.element_ty, is_pure=False, pack=8 * CHUNKS,
    )  # fmt: skip


@gluon.jit
def confirmed(values, pointers, patience):
    """Floats of 32 bits that were loaded from there; wait for those that are missing."""
    bits = gl.inline_asm_elementwise(
        _CONFIRM, "=&r,r,l,r", [values.to(gl.int32, bitcast=True), pointers, patience],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def publish(pointers, values, inside):
    """Store floats of 16 or 32 bits for other programs."""
    if values.dtype.primitive_bitwidth == 16:
        gl.inline_asm_elementwise(
            _PUBLISH_16, "=r,l,r,r",
            [pointers, values.to(gl.int16, bitcast=True).to(gl.int32), inside.to(gl.int32)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            _PUBLISH_32, "=r,l,r,r",
            [pointers, values.to(gl.int32, bitcast=True), inside.to(gl.int32)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def erase(words, COUNT: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Fill `words` [COUNT] int32 with ones; each program a block of them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(words + at, gl.full([BLOCK], -1, gl.int32, layout=layout), mask=at < COUNT)


@gluon.jit
def stage_row(
    source, x_shared, size, factor, patience,
    FIRST: gl.constexpr, LAST: gl.constexpr, VALUES: gl.constexpr, WAITS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Copy numbers FIRST to LAST of a row [size], times a factor, to x_shared [VALUES / 64, 64].

    Numbers after `size` are zero. FIRST must be 0, or the rest at most the values that all threads
    load at once. With WAITS, wait for numbers that have not arrived.
    """
    CHUNKS: gl.constexpr = _chunks_of(LAST - FIRST, 32 * WARPS)
    BLOCK: gl.constexpr = 256 * WARPS * CHUNKS
    dtype: gl.constexpr = source.dtype.element_ty
    blocks = x_shared._reinterpret(
        dtype, [VALUES // BLOCK, BLOCK // 64, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    for i in gl.static_range(FIRST // BLOCK, (LAST + BLOCK - 1) // BLOCK):
        at = i * BLOCK + gl.arange(0, BLOCK, layout=layout)
        values = arrived(source + at, (at < size) & (at < LAST), patience, CHUNKS, WAITS)
        blocks.index(i).store(gl.reshape(values * factor, [BLOCK // 64, 64]))


hash_functions(globals())
