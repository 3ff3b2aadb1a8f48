"""Rounding to e4m3, as part of other kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions


@triton.jit
def to_e4m3(x, scale):
    """x / scale as e4m3, bit for bit as `kernels.quant.e4m3.quantise`.

    It computes the bits, because Triton's interpreter rounds subnormal numbers and NaN in another
    way than a GPU.
    """
    bits = tl.div_rn(x.to(tl.float32), scale).to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Of a float32 at least 2^-6: keep three bits of its mantissa, rounded, and move its exponent.
    kept = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - 960
    # A smaller one is a multiple of 2^-9, the last place of a float32 near 2^14.
    near = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = near.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)  # NaN
    code = code | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def to_cache(x, scale, dtype: tl.constexpr):
    """x rounded to `dtype`, the dtype of queries; as e4m3 with `scale` unless it is None."""
    x = x.to(dtype)
    if scale is not None:
        x = to_e4m3(x, scale)
    return x


hash_functions(globals())
