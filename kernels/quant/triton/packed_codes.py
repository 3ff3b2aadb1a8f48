"""Turns tiles of packed words (see `kernels.quant.tiled`) into tiles of numbers, in registers.

A register holds two words of neighbouring columns, so an instruction works on two numbers. The
bits of a code become the mantissa of a known number, which is then subtracted, or the fields of a
float with a small exponent, which is then multiplied away. All of it is exact. (The NaN of fp8
becomes 480.) Triton's interpreter knows no assembly, so plain versions compute the same for it.

The bits of codes of "fp4" lie where one shift takes sign and fields of bfloat16 to their place, or
none, in two of four slices. That takes fewer instructions than codes side by side.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launch import hash_functions
from ..packed import Kind
from ..tiled import FP4_FIELDS, FP4_SIGNS

KINDS = {"fp8": 0, "int8": 1, "int4": 2, "fp4": 3}  # values of KIND


def _twice(half: int) -> str:
    return f"0x{half:04x}{half:04x}"


def _assembly(lines: list[str], outputs: int) -> tl.constexpr:
    """Assembly whose operands are `outputs` results and then the inputs."""
    body = "\n".join(lines).replace("IN", f"${outputs}")
    return tl.constexpr("{ .reg .b32 a, b, c;\n" + body + "\n}")


def _fp8(dtype: str) -> list[str]:
    """Lines for floats of 8 bits: the fields come under a mask, and the sign to bit 15."""
    fields, right, factor = {"bf16": (0x07F0, 4, 0x7B80), "f16": (0x3F80, 1, 0x5C00)}[dtype]
    return [
        f"mov.b32 c, {_twice(factor)};",
        "shl.b32 a, IN, 8;",
        f"shl.b32 b, IN, {8 - right};",
        f"and.b32 b, b, {_twice(fields)};",
        "lop3.b32 b, a, 0x80008000, b, 0xea;",  # (a & mask) | b
        f"mul.rn.{dtype}x2 $0, b, c;",
        f"shr.u32 b, IN, {right};",
        f"and.b32 b, b, {_twice(fields)};",
        "lop3.b32 b, IN, 0x80008000, b, 0xea;",
        f"mul.rn.{dtype}x2 $1, b, c;",
    ]


def _fp4_fields(dtype: str) -> list[str]:
    """Lines for the floats of "fp4" before a factor, in the first four results."""
    lowest = {"bf16": 6, "f16": 9}[dtype]  # the bit of the mantissa that is the last of a code
    lines = []
    for index, (field, sign) in enumerate(zip(FP4_FIELDS, FP4_SIGNS, strict=True)):
        up, sign_up, mask = lowest - field, 15 - sign, 7 << lowest
        if up == sign_up:
            mask |= 0x8000
        source = "a" if up else "IN"
        if up:
            lines.append(f"shl.b32 a, IN, {up};" if up > 0 else f"shr.u32 a, IN, {-up};")
        lines.append(f"and.b32 ${index}, {source}, {_twice(mask)};")
        if up != sign_up:
            source = "a" if sign_up else "IN"
            if sign_up:
                lines.append(f"shl.b32 a, IN, {sign_up};")
            lines.append(f"lop3.b32 ${index}, {source}, 0x80008000, ${index}, 0xea;")
    return lines


def _fp4(dtype: str) -> list[str]:
    factor = {"bf16": 0x7E80, "f16": 0x7400}[dtype]
    lines = [f"mov.b32 c, {_twice(factor)};", *_fp4_fields(dtype)]
    return lines + [f"mul.rn.{dtype}x2 ${index}, ${index}, c;" for index in range(4)]


def _int8(dtype: str) -> list[str]:
    lines = []
    for index in (0, 1):
        source = "IN"
        if index:
            lines.append("shr.u32 a, IN, 8;")
            source = "a"
        if dtype == "f16":  # 1024 + (code + 128), minus 1152
            lines += [
                "mov.b32 c, 0x64806480;",
                f"lop3.b32 b, {source}, 0x00ff00ff, c, 0x6a;",  # (source & mask) ^ c
            ]
        else:  # (128 + low bits) minus (128, or 256 if negative)
            lines += [
                "mov.b32 c, 0x43004300;",
                f"lop3.b32 b, {source}, 0x007f007f, c, 0xea;",
                f"lop3.b32 c, {source}, 0x00800080, c, 0xea;",
            ]
        lines.append(f"sub.{dtype}x2 ${index}, b, c;")
    return lines


def _int4(dtype: str, subtract: bool) -> list[str]:
    base = {"bf16": 0x4300, "f16": 0x6400}[dtype]  # 128 or 1024: the last bit of its mantissa is 1
    lines = [f"mov.b32 c, {_twice(base)};", f"mov.b32 b, {_twice(base + 8)};"]
    for index in range(4):
        source, result = "IN", "a" if subtract else f"${index}"
        if index:
            lines.append(f"shr.u32 a, IN, {4 * index};")
            source = "a"
        lines.append(f"lop3.b32 {result}, {source}, 0x000f000f, c, 0xea;")
        if subtract:
            lines.append(f"sub.{dtype}x2 ${index}, a, b;")
    return lines


def _masked(bits: int, dtype: str) -> list[str]:
    """Lines for floats with small exponents by masks and shifts: see `scaled_numbers`."""
    if bits == 4:
        return [
            "and.b32 $0, IN, 0x000f000f;",
            "and.b32 $1, IN, 0x00f000f0;",
            "shr.u32 a, IN, 8;",
            "and.b32 $2, a, 0x000f000f;",
            "and.b32 $3, a, 0x00f000f0;",
        ]
    fields, right = {"bf16": (0x07F0, 4), "f16": (0x3F80, 1)}[dtype]
    left = f"shl.b32 b, IN, {8 - right};"
    return [
        "shl.b32 a, IN, 8;",
        left,
        f"and.b32 b, b, {_twice(fields)};",
        "lop3.b32 $0, a, 0x80008000, b, 0xea;",  # (source & mask) | b
        f"shr.u32 b, IN, {right};",
        f"and.b32 b, b, {_twice(fields)};",
        "lop3.b32 $1, IN, 0x80008000, b, 0xea;",
    ]


_FP8_BF16, _FP8_F16 = _assembly(_fp8("bf16"), 2), _assembly(_fp8("f16"), 2)  # 2 ** 120, 2 ** 8
_FP4_BF16, _FP4_F16 = _assembly(_fp4("bf16"), 4), _assembly(_fp4("f16"), 4)  # 2 ** 126, 2 ** 14
# Times a factor for the first two slices and one for the others, which hold 2 ** 126.
FP4_TIMES = _assembly(
    [*_fp4_fields("bf16"), *(f"mul.rn.bf16x2 ${i}, ${i}, ${5 + i // 2};" for i in range(4))], 4
)
_INT8_BF16, _INT8_F16 = _assembly(_int8("bf16"), 2), _assembly(_int8("f16"), 2)
_INT4_BF16, _INT4_F16 = _assembly(_int4("bf16", True), 4), _assembly(_int4("f16", True), 4)


def _int4_parts() -> list[str]:
    """Lines for (codes - 8) / 64 in bfloat16: one instruction multiplies the tiny floats that masks
    make of codes, and subtracts."""
    lines = ["mov.b32 c, 0xbe00be00;", *_masked(4, "")]  # -8 / 64
    for index in range(4):  # times 2 ** 127 or 2 ** 123
        factor = 0x7D00 if index % 2 else 0x7F00
        lines += [f"mov.b32 b, {_twice(factor)};", f"fma.rn.bf16x2 ${index}, ${index}, b, c;"]
    return lines


_INT4_PARTS = _assembly(_int4_parts(), 4)
MASKED_4 = _assembly(_masked(4, ""), 4)
MASKED_FP8_BF16, MASKED_FP8_F16 = (_assembly(_masked(8, of), 2) for of in ("bf16", "f16"))
_RAW_BF16, _RAW_F16 = _assembly(_int4("bf16", False), 4), _assembly(_int4("f16", False), 4)


@triton.jit
def _two(words, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], (DTYPE.value,) * 2, True, pack=2)


@triton.jit
def _four(words, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,=r,=r,r", [words], (DTYPE.value,) * 4, True, pack=2
    )


@triton.jit
def plain_numbers(words, INDEX: tl.constexpr, KIND: tl.constexpr):
    """The numbers of slice INDEX in float32, of "int4" before a zero is subtracted."""
    if KIND == 3:  # of the bits of a float, see `FP4_FIELDS` and `FP4_SIGNS`
        UP: tl.constexpr = 16 if INDEX == 0 else 19 if INDEX == 1 else 22 if INDEX == 2 else 10
        SIGN: tl.constexpr = 16 if INDEX == 0 else 20 if INDEX == 1 else 22 if INDEX == 2 else 21
        wide = words.to(tl.int32)
        code = ((wide << SIGN) & -2147483648) | ((wide << UP) & 0x01C00000)
    elif KIND == 2:
        code = (words.to(tl.int32) >> (4 * INDEX)) & 15
    else:
        code = (words.to(tl.int32) >> (8 * INDEX)) & 255
    if KIND == 0:
        bits = ((code & 128) << 24) | ((code & 127) << 20)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    elif KIND == 1:
        number = ((code ^ 128) - 128).to(tl.float32)
    elif KIND == 2:
        number = code.to(tl.float32)
    else:
        number = code.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126
    return number


@triton.jit
def int4_codes(words, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The codes of "int4" of each slice, plus 128 of bfloat16 or 1024: a tuple of 4 tiles.

    In the interpreter, without assembly, nothing is added.
    """
    if ASSEMBLY:
        a, b, c, d = _four(words, _RAW_BF16 if DTYPE == tl.bfloat16 else _RAW_F16, DTYPE)
    else:
        a, b = plain_numbers(words, 0, 2).to(DTYPE), plain_numbers(words, 1, 2).to(DTYPE)
        c, d = plain_numbers(words, 2, 2).to(DTYPE), plain_numbers(words, 3, 2).to(DTYPE)
    return a, b, c, d


@triton.jit
def int4_parts(words):
    """(Codes of "int4" - 8) / 64 of each slice, in bfloat16: a tuple of 4 tiles."""
    return _four(words, _INT4_PARTS, tl.bfloat16)


@triton.jit
def _minus(tile, zero, BASE: tl.constexpr):
    less = (zero.to(tl.float32) + BASE).to(tile.dtype)
    less = tl.expand_dims(tl.join(less, less), -1)  # a layout follows from the pair
    if len(tile.shape) == 3:
        wide = tl.broadcast_to(less, [tile.shape[0], tile.shape[1], 2, tile.shape[2] // 2])
    else:
        wide = tl.broadcast_to(less, [tile.shape[0], 2, tile.shape[1] // 2])
    return tile - tl.reshape(wide, tile.shape)


@triton.jit
def numbers(
    words,
    zeros,  # tuple of 4: [rows], zeros of each slice, if ZEROS
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,  # False in the interpreter
):
    """The numbers [rows, width] of each slice of a tile of words, before scales: a tuple of 4.

    Kinds of 8 bits have two slices, which are returned twice.
    """
    if ASSEMBLY:
        if KIND == 0:
            a, b = _two(words, _FP8_BF16 if DTYPE == tl.bfloat16 else _FP8_F16, DTYPE)
            c, d = a, b
        elif KIND == 1:
            a, b = _two(words, _INT8_BF16 if DTYPE == tl.bfloat16 else _INT8_F16, DTYPE)
            c, d = a, b
        elif KIND == 3:
            a, b, c, d = _four(words, _FP4_BF16 if DTYPE == tl.bfloat16 else _FP4_F16, DTYPE)
        elif ZEROS:
            a, b, c, d = _four(words, _RAW_BF16 if DTYPE == tl.bfloat16 else _RAW_F16, DTYPE)
        else:
            a, b, c, d = _four(words, _INT4_BF16 if DTYPE == tl.bfloat16 else _INT4_F16, DTYPE)
    else:
        a = plain_numbers(words, 0, KIND)
        b = plain_numbers(words, 1, KIND)
        c, d = a, b
        if KIND >= 2:
            c = plain_numbers(words, 2, KIND)
            d = plain_numbers(words, 3, KIND)
        if KIND == 2 and not ZEROS:
            a, b, c, d = a - 8.0, b - 8.0, c - 8.0, d - 8.0
        a, b, c, d = a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)
    if ZEROS:  # assembly added 128 or 1024 to the codes
        base: tl.constexpr = 0.0 if not ASSEMBLY else 128.0 if DTYPE == tl.bfloat16 else 1024.0
        a, b = _minus(a, zeros[0], base), _minus(b, zeros[1], base)
        c, d = _minus(c, zeros[2], base), _minus(d, zeros[3], base)
    return a, b, c, d


# Of `scaled_numbers`: exponents of 2 by which numbers of even and of odd slices are too small.
_SMALLER = {
    ("int4", torch.bfloat16): (133, 129),  # bits 0 and 4 of a number below 2 ** -125
    ("int4", torch.float16): (24, 20),
    ("fp8", torch.bfloat16): (120, 120),
    ("fp8", torch.float16): (8, 8),
}


def sum_factor(
    kind: Kind, dtype: torch.dtype, assembly: bool, input_factor: float
) -> tuple[tuple[float, ...], bool]:
    """By what sums of products of `scaled_numbers` are multiplied, for each slice; and whether
    inputs are multiplied by `input_factor` first, so that products are no smaller than float32."""
    if not assembly or kind not in ("int4", "fp8"):
        return (1.0,) * 4, False
    scaled = dtype == torch.bfloat16
    own = input_factor if scaled else 1.0
    return tuple(2.0**by / own for by in _SMALLER[kind, dtype] * 2), scaled


@triton.jit
def scaled_numbers(words, KIND: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The numbers of each slice, or codes of "int4" with their zero, times powers of 2 that depend
    on kind, dtype and slice: a tuple of 4 tiles. In the interpreter, without these powers.

    A float with an exponent of 0 is its mantissa times the smallest number, and one with an
    exponent of 1 goes on from there. So the bits of a code, wherever they are in the mantissa and
    in the last bit of the exponent, are its number times a power of 2. The fields of an fp8 are a
    small float.
    """
    if ASSEMBLY and KIND == 0:
        a, b = _two(words, MASKED_FP8_BF16 if DTYPE == tl.bfloat16 else MASKED_FP8_F16, DTYPE)
        c, d = a, b
    elif ASSEMBLY and KIND == 2:
        a, b, c, d = _four(words, MASKED_4, DTYPE)
    elif KIND == 2:
        a, b = plain_numbers(words, 0, 2).to(DTYPE), plain_numbers(words, 1, 2).to(DTYPE)
        c, d = plain_numbers(words, 2, 2).to(DTYPE), plain_numbers(words, 3, 2).to(DTYPE)
    else:
        a, b, c, d = numbers(words, (), KIND, DTYPE, False, ASSEMBLY)
    return a, b, c, d


_FP8_PAIR = tl.constexpr("""{ .reg .b32 pair; .reg .b16 low, high;
cvt.rn.f16x2.e4m3x2 pair, $2;
mov.b32 {low, high}, pair;
cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}""")


@triton.jit
def float_pair(words, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The numbers of both slices of words of a kind of 8 bits, in float32."""
    if KIND == 0 and ASSEMBLY:
        a, b = tl.inline_asm_elementwise(
            _FP8_PAIR, "=f,=f,h", [words], (tl.float32, tl.float32), True, pack=1
        )
    elif KIND == 1:  # 2 ** 23 + (code + 128)
        codes = words.to(tl.int32) ^ 0x8080
        a = ((codes & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        b = (((codes >> 8) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        a, b = plain_numbers(words, 0, KIND), plain_numbers(words, 1, KIND)
    return a, b


hash_functions(globals())
