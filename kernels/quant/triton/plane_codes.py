"""Turns tiles of words of two planes (see `kernels.quant.planes`) into tiles of numbers.

As in `packed_codes`, a register holds two words, and the bits of a code become the fields of a
float with a small exponent. An instruction takes the bits of the first plane from one register and
those of the second from another. The next clears the rest, and the last multiplies the power of 2
away and subtracts the zero. So a slice needs three instructions, besides shifts that slices share.
Numbers are exact, but divided by `UNITS`, because no factor is large enough for all of the power.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launch import hash_functions
from ..packed import HIGH_BITS, Kind

PLANE_KINDS: dict[Kind, int] = {
    "int5": 4,
    "int6": 5,
}  # values of KIND, beside those of `packed_codes.KINDS`
# What sums of products are multiplied by, because numbers are divided by it.
UNITS = {torch.bfloat16: 64.0, torch.float16: 512.0}
_EXPONENTS = {"bf16": (7, 127, 127), "f16": (10, 15, 15)}  # bits of mantissa, bias, largest factor
_SELECT = "0xe4"  # (a & c) | (b & ~c)


def unit_of(dtype: torch.dtype, assembly: bool) -> float:
    """What sums of products are multiplied by: 1 in the interpreter."""
    return UNITS[dtype] if assembly else 1.0


def _power(exponent: int, dtype: str) -> int:
    """The bits of a power of 2."""
    mantissa, bias, _ = _EXPONENTS[dtype]
    return exponent + bias << mantissa


def assembly(kind: Kind, tile: int, dtype: str, centred: bool) -> str:
    """Assembly for the 4 slices of a word of the first plane, the `tile`-th of a span.

    $4 is a register of the first plane, $5 one of the second. With `centred`, 16 or 32 is
    subtracted.
    """
    bits = HIGH_BITS[kind]
    most = _EXPONENTS[dtype][2]
    unit = {"bf16": 6, "f16": 9}[dtype]  # the logarithm of `UNITS`
    zero = 0
    if centred:  # 16 or 32, divided by the unit, and the sign
        zero = _power(3 + bits - unit, dtype) | 0x8000
    lines = [f"mov.b32 c, 0x{zero:04x}{zero:04x};"]
    for pair in (0, 1):
        right = 2 * bits * (2 * tile + pair) - (4 - bits)
        move = f"shr.u32 b, $5, {right};" if right > 0 else f"shl.b32 b, $5, {-right};"
        lines += ["shr.u32 a, $4, 8;", move] if pair else [move]
        source = "a" if pair else "$4"
        for odd in (0, 1):
            own = 0x00F0 if odd else 0x000F
            other = (0xF0 >> bits if odd else 0x0F << bits) & ~own & 0xFF
            factor = _power(most - ((4 - bits) if odd else 0), dtype)
            result = f"${2 * pair + odd}"
            lines += [
                f"lop3.b32 {result}, {source}, b, 0x{own:04x}{own:04x}, {_SELECT};",
                f"and.b32 {result}, {result}, 0x{own | other:04x}{own | other:04x};",
                f"mov.b32 d, 0x{factor:04x}{factor:04x};",
                f"fma.rn.{dtype}x2 {result}, {result}, d, c;",
            ]
    return "{ .reg .b32 a, b, c, d;\n" + "\n".join(lines) + "\n}"


# The assembly of each kind, dtype, with `centred` or not, and tile of a span.
_LINES = tl.constexpr(
    "||".join(
        "|".join(assembly(kind, tile, dtype, centred) for tile in range(4 // HIGH_BITS[kind]))
        for kind in PLANE_KINDS
        for dtype in _EXPONENTS
        for centred in (False, True)
    )
)


@triton.constexpr_function
def _of_tile(lines, kind, dtype, centred, tile):
    index = 4 * (kind - 4) + 2 * (dtype == tl.float16) + centred
    return lines.split("||")[index].split("|")[tile]


@triton.jit
def _four(low, high, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r,r,r", [low, high], (DTYPE.value,) * 4, True, pack=2
    )


@triton.jit
def plain_plane_codes(low, high, SLICE: tl.constexpr, KIND: tl.constexpr):
    """The codes of a slice of a span, as int32. `low`: words of its tile of the first plane."""
    BITS: tl.constexpr = KIND - 3
    MASK: tl.constexpr = (1 << BITS) - 1
    nibble = (low.to(tl.int32) >> (4 * (SLICE % 4))) & 15
    rest = high.to(tl.int32) >> (SLICE // 2 * 2 * BITS)
    if SLICE % 2 == 0:
        code = nibble | (((rest >> BITS) & MASK) << 4)
    else:
        code = (nibble << BITS) | (rest & MASK)
    return code


@triton.jit
def bits_of_step(high, k, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Words of the second plane with the bits of the 128 columns from k on the right: of "int5",
    which has 256 columns in a word, those of the second half are shifted there."""
    if KIND == 4:
        shift = k // 128 % 2 * 8
        if ASSEMBLY:  # two words at once; what comes into the upper bits is not read
            shift = tl.broadcast_to(shift, high.shape)
            high = tl.inline_asm_elementwise(
                "shr.u32 $0, $1, $2;", "=r,r,r,r", [high, shift], tl.int16, True, pack=2
            )
        else:
            high = (high.to(tl.int32) >> shift).to(tl.int16)
    return high


@triton.jit
def plane_numbers(
    low,  # int16 tile of words of the first plane
    high,  # the words of the second plane at the same places, see `bits_of_step`
    TILE: tl.constexpr,  # which of the tiles of the first plane that share the word of the second
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    CENTRED: tl.constexpr,  # 16 or 32 is subtracted
    ASSEMBLY: tl.constexpr,  # False in the interpreter
):
    """The numbers of 4 slices before scales, divided by `unit_of`: a tuple of 4 tiles."""
    if ASSEMBLY:
        a, b, c, d = _four(low, high, _of_tile(_LINES, KIND, DTYPE, CENTRED, TILE), DTYPE)
    else:
        ZERO: tl.constexpr = (8 << (KIND - 3)) if CENTRED else 0
        a = (plain_plane_codes(low, high, 4 * TILE, KIND) - ZERO).to(DTYPE)
        b = (plain_plane_codes(low, high, 4 * TILE + 1, KIND) - ZERO).to(DTYPE)
        c = (plain_plane_codes(low, high, 4 * TILE + 2, KIND) - ZERO).to(DTYPE)
        d = (plain_plane_codes(low, high, 4 * TILE + 3, KIND) - ZERO).to(DTYPE)
    return a, b, c, d


hash_functions(globals())
