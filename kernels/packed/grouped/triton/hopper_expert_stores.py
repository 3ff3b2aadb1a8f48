"""Stores what the consumers of `hopper_experts` computed."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....launch import hash_functions

ROWS = gl.constexpr(64)  # weight rows of a consumer


@gluon.jit
def _bias_of(bias, row, n, N, LAYOUT: gl.constexpr):
    return gl.load(bias + row, mask=n < N, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def store_inner(
    gate, up, bias, out, expert, start, first, rows, N,
    TOKENS: gl.constexpr, BIAS: gl.constexpr, CLAMPED: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Store activated values [64, TOKENS] in the order of columns that `arrange` gives x, and zeros
    in the columns that fill the last step."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    stored: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    if BIAS:
        n = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        row = expert * (2 * N) + n
        gate += _bias_of(bias, row, n, N, LAYOUT)
        up += _bias_of(bias, row + N, n, N, LAYOUT)
    dtype: gl.constexpr = out.dtype.element_ty
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    if CLAMPED:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = gate / (1.0 + gl.exp(-ALPHA * gate))
    else:
        gate = gate / (1.0 + gl.exp(-gate))
    result = (gate.to(dtype).to(gl.float32) * up).to(dtype)
    result = gl.convert_layout(result, stored)
    n = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, stored))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, stored))
    place = n // 256 * 256 + n % 64 // 4 * 16 + n % 4 // 2 * 8 + n % 256 // 64 * 2 + n % 2
    at = out + gl.cast(first + token, gl.int64)[None, :] * WIDTH + place[:, None]
    there = (token < rows)[None, :] & (n < N)[:, None]
    gl.store(at, result, mask=there)
    if WIDTH != N:
        if start + ROWS >= N:
            nothing = gl.zeros([ROWS, TOKENS], dtype, layout=stored)
            for more in gl.static_range(1, 4):
                if start % 256 // 64 + more < 4:
                    gl.store(at + 2 * more, nothing, mask=there)


@gluon.jit
def store_parts(
    sums, bias, pairs, pair_weights, out, expert, start, first, rows, N, num_rows,
    TOKENS: gl.constexpr, BIAS: gl.constexpr, TOP_K: gl.constexpr,
):  # fmt: skip
    """Store sums [64, TOKENS] times the weights of their pairs, each pair in its own row."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    stored: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    if BIAS:
        n = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        sums += _bias_of(bias, expert * N + n, n, N, LAYOUT)
    sums = gl.convert_layout(sums, stored)
    n = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, stored))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, stored))
    pair = gl.load(pairs + first + token, mask=token < rows, other=0)
    share = gl.load(pair_weights + pair, mask=token < rows, other=0.0)
    target = gl.cast(pair % TOP_K * num_rows + pair // TOP_K, gl.int64)
    there = (token < rows)[None, :] & (n < N)[:, None]
    sums = (sums * share[None, :]).to(out.dtype.element_ty)
    gl.store(out + target[None, :] * N + n[:, None], sums, mask=there)


hash_functions(globals())
