"""Loads scales and offsets of small groups: 4 bytes of neighbouring groups at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launch import hash_functions
from .packed_scales import factors_of

# Values of STORED: the type of scales of which a register holds 4, 2 or 1. Others have -1.
STORED = {torch.uint8: 0, torch.int8: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}


@triton.jit
def _registers(
    source, stride, k, n, inside, num_registers,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """The scales of a span's groups: a tuple of int32 [BLOCK_N]."""
    PER: tl.constexpr = 4 if STORED < 2 else 2 if STORED < 4 else 1
    vectors = ()
    for i in tl.static_range(GROUPS // PER):
        at = k // GROUP // PER + i
        there = inside & (at < num_registers)
        vectors += (tl.load(source + at * stride + n, mask=there, other=0),)
    return vectors


@triton.jit
def plane_factors(
    scales, zeros, sizes, k, n, inside, FACTORS: tl.constexpr, STORED: tl.constexpr,
    NARROW: tl.constexpr = False,
):  # fmt: skip
    """`factors_of`, but of small groups scales and offsets stay as they are in memory.

    Those are tuples of int32 [BLOCK_N] of the groups of the span from column k, and the super scale
    or offset comes last. `scales` and `zeros` are int32 [num_groups, N].
    """
    GROUPS: tl.constexpr = FACTORS[1]
    GROUP: tl.constexpr = FACTORS[2]
    ZEROS: tl.constexpr = FACTORS[4]
    if STORED < 0:
        s, z = factors_of(scales, zeros, sizes, k, n, inside, FACTORS, NARROW)
    else:
        s = _registers(scales, sizes[0], k, n, inside, sizes[2], GROUPS, GROUP, STORED)
        z = s
        if ZEROS == 2:
            z = _registers(zeros, sizes[1], k, n, inside, sizes[2], GROUPS, GROUP, STORED)
        if STORED < 2:
            at = k // 256 * sizes[0] + n
            there = inside & (k // GROUP // 4 < sizes[2])
            s += (tl.load(sizes[3] + at, mask=there, other=0),)
            if ZEROS == 2:
                z += (tl.load(sizes[4] + at, mask=there, other=0),)
    return s, z


@triton.jit
def scale_in(bits, INDEX: tl.constexpr, STORED: tl.constexpr):
    """The INDEX-th of the scales in registers, in float32."""
    if STORED == 0:
        number = ((bits >> (8 * INDEX)) & 255).to(tl.float32)
    elif STORED == 1:
        number = ((bits << (24 - 8 * INDEX)) >> 24).to(tl.float32)
    elif STORED == 2:
        number = (bits >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif STORED == 3:
        number = ((bits >> (16 * INDEX)) << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.float32, bitcast=True)
    return number


@triton.jit
def factor_of(registers, INDEX: tl.constexpr, GROUPS: tl.constexpr, STORED: tl.constexpr):
    """The scale or offset of group INDEX in float32, of what `plane_factors` loaded."""
    PER: tl.constexpr = 4 if STORED < 2 else 2 if STORED < 4 else 1
    number = scale_in(registers[INDEX // PER], INDEX % PER, STORED)
    if STORED < 2:
        number *= registers[GROUPS // PER].to(tl.float32)
    return number


@triton.jit
def factors_of_slices(registers, GROUPS: tl.constexpr, STORED: tl.constexpr):
    """What `plane_factors` loaded, as `factors_of` returns it: a tuple of 4 [BLOCK_N]."""
    if STORED < 0:
        vectors = registers
    else:
        vectors = ()
        for i in tl.static_range(4):
            vectors += (factor_of(registers, i % GROUPS, GROUPS, STORED),)
    return vectors


hash_functions(globals())
