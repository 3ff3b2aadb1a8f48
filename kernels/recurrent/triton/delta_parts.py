"""Parts of the kernels of gated delta layers: the convolution of four taps, the norm, the gates."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions


@triton.jit
def row_fields(rows, rows_stride, row):
    """Length, border, block, slot, start, lag and count of a row of `DeltaRows.values` [7, N*]."""
    length = tl.load(rows + row)
    border = tl.load(rows + rows_stride + row)
    block = tl.load(rows + 2 * rows_stride + row).to(tl.int64)
    slot = tl.load(rows + 3 * rows_stride + row).to(tl.int64)
    start = tl.load(rows + 4 * rows_stride + row)
    lag = tl.load(rows + 5 * rows_stride + row)
    count = tl.load(rows + 6 * rows_stride + row)
    return length, border, block, slot, start, lag, count


@triton.jit
def conv_weights(conv, conv_stride, tap_stride, first, at, inside):
    """The four taps of the channels first + at; conv: [channels, 4] with these strides."""
    own = conv + first * conv_stride + at * conv_stride
    w0 = tl.load(own, mask=inside, other=0.0)
    w1 = tl.load(own + tap_stride, mask=inside, other=0.0)
    w2 = tl.load(own + 2 * tap_stride, mask=inside, other=0.0)
    w3 = tl.load(own + 3 * tap_stride, mask=inside, other=0.0)
    return w0, w1, w2, w3


@triton.jit
def convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """silu of the convolution; x3 is the token's own input."""
    y = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1
    y = y + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
    return y * tl.sigmoid(y)


@triton.jit
def normed(x):
    """x / sqrt(sum(x^2) + 1e-6) of a vector."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def log_decay(a, rate, bias):
    """-rate * softplus(a + bias)."""
    a += bias
    return -rate * (tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a))))


@triton.jit
def gates_of(a, b, rate, bias):
    """The log decay and the beta of one head, from a token's inputs."""
    return log_decay(a.to(tl.float32), rate, bias), tl.sigmoid(b.to(tl.float32))


hash_functions(globals())
