"""Triton linear layer for one row with weights of 8 bits: as `gemv`, but with packed words.

Words pass through registers once; a scale of a block multiplies sums over its columns, and scales
of whole rows the results. The first chunks are loaded before the input is ready.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...linear.linear import Norm
from ...linear.linear_choice import Gemv
from ...linear.triton.gemv import gated
from ...quant.tiled import TiledWeight
from ...quant.triton.packed_codes import float_pair
from ..kinds import GATE_UP, PLAIN, fits_gemv
from .arguments import empty_output, product_arguments, scale_arguments, taken


@triton.jit
def _chunk(words, rows, start, num_spans, row_inside, num_words, SPANS: tl.constexpr):
    """Words [ROWS, SPANS, 64] of spans from `start`."""
    span = start + tl.arange(0, SPANS)
    j = tl.arange(0, 64)
    at = rows[:, None, None] * num_words + (span[:, None] * 64 + j[None, :])[None, :, :]
    inside = row_inside[:, None, None] & (span < num_spans)[None, :, None]
    return tl.load(words + at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _chunk_scales(
    scales, stride, rows, start, num_spans, row_inside, SPANS: tl.constexpr, ROW_GROUP: tl.constexpr
):
    """Block scales [ROWS, SPANS, 1] of spans from `start`."""
    span = start + tl.arange(0, SPANS)
    at = span[None, :] * stride + (rows // ROW_GROUP)[:, None]
    inside = row_inside[:, None] & (span < num_spans)[None, :]
    return tl.load(scales + at, mask=inside, other=0).to(tl.float32)[:, :, None]


@triton.jit
def _input(x, gain, squares, at, num_inputs, NORM: tl.constexpr):
    value = tl.load(x + at, mask=at < num_inputs, other=0.0).to(tl.float32)
    if NORM:
        squares += value * value
        value *= tl.load(gain + at, mask=at < num_inputs, other=0.0).to(tl.float32)
    return value, squares


@triton.jit
def _packed_gemv_kernel(
    words,  # [N, W], contiguous; [2 N, W] if gated
    x,  # [K]
    gain,  # [K], weight of the norm
    scales,  # [groups, N / ROW_GROUP], of blocks
    channel,  # [N] or [2 N], factors of whole rows
    bias,  # [N] or [2 N]
    residual,  # [N]
    out,  # [N]
    eps,
    num_outputs,  # N
    num_inputs,  # K
    stride,  # of `scales`
    NUM_SPANS: tl.constexpr,  # W / 64
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,  # spans of 128 columns in a chunk
    AHEAD: tl.constexpr,  # chunks in flight besides the one in use
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,  # 1 = a scale for each span, 0 = the scales are in `channel`
    ROW_GROUP: tl.constexpr,
    CHANNEL: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    up = n + num_outputs
    inside = n < num_outputs
    num_words: tl.constexpr = NUM_SPANS * 64
    acc = tl.zeros([ROWS, SPANS, 64], tl.float32)
    acc_up = acc
    squares = tl.zeros([SPANS, 64], tl.float32)
    chunks = ()
    up_chunks = ()
    for start in tl.static_range(0, AHEAD * SPANS, SPANS):
        if start < NUM_SPANS:
            chunks += (_chunk(words, n, start, NUM_SPANS, inside, num_words, SPANS),)
            if MODE == 2:
                up_chunks += (_chunk(words, up, start, NUM_SPANS, inside, num_words, SPANS),)
    wait_for_inputs(PDL)
    column = tl.arange(0, SPANS)[:, None] * 128 + tl.arange(0, 64)[None, :]
    for start in tl.static_range(0, NUM_SPANS, SPANS):
        if start + AHEAD * SPANS < NUM_SPANS:
            ahead = start + AHEAD * SPANS
            chunks += (_chunk(words, n, ahead, NUM_SPANS, inside, num_words, SPANS),)
            if MODE == 2:
                up_chunks += (_chunk(words, up, ahead, NUM_SPANS, inside, num_words, SPANS),)
        x0, squares = _input(x, gain, squares, start * 128 + column, num_inputs, NORM)
        x1, squares = _input(x, gain, squares, start * 128 + 64 + column, num_inputs, NORM)
        a, b = float_pair(chunks[start // SPANS], KIND, ASSEMBLY)
        if GROUPS > 0:
            s = _chunk_scales(scales, stride, n, start, NUM_SPANS, inside, SPANS, ROW_GROUP)
            acc += s * (a * x0[None, :, :] + b * x1[None, :, :])
        else:
            acc += a * x0[None, :, :]
            acc += b * x1[None, :, :]
        if MODE == 2:
            a, b = float_pair(up_chunks[start // SPANS], KIND, ASSEMBLY)
            if GROUPS > 0:
                s = _chunk_scales(scales, stride, up, start, NUM_SPANS, inside, SPANS, ROW_GROUP)
                acc_up += s * (a * x0[None, :, :] + b * x1[None, :, :])
            else:
                acc_up += a * x0[None, :, :]
                acc_up += b * x1[None, :, :]

    y = tl.sum(tl.sum(acc, 2), 1)
    u = y
    if MODE == 2:
        u = tl.sum(tl.sum(acc_up, 2), 1)
    if NORM:  # the scale of the whole row is applied last
        scale = tl.rsqrt(tl.sum(squares) / num_inputs + eps)
        y *= scale
        u *= scale
    if CHANNEL:
        y *= tl.load(channel + n, mask=inside, other=0.0).to(tl.float32)
        if MODE == 2:
            u *= tl.load(channel + up, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if MODE == 2:
            u += tl.load(bias + up, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + n, mask=inside, other=0.0).to(tl.float32)
    if MODE == 2:
        y = gated(y, u, ACTIVATION)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=inside)


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Gemv,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.packed.linear`; x must be one row, [1, K]. Parts are not a mode of it."""
    assert mode == PLAIN or (mode == GATE_UP and residual is None)
    assert x.shape[0] == 1 and x.stride(1) == 1 and weight.words.is_contiguous()
    assert fits_gemv(weight) and choice.block_k % 128 == 0
    num_outputs = weight.shape[0] // (2 if mode == GATE_UP else 1)
    out = empty_output(x, num_outputs, mode)
    arguments = product_arguments(x, weight, mode, bias, activation, norm, residual)
    _packed_gemv_kernel[(triton.cdiv(num_outputs, choice.rows),)](
        weight.words,
        x,
        out=out,
        **taken(_packed_gemv_kernel, arguments | scale_arguments(weight, x)),
        NUM_SPANS=weight.words.shape[1] // 64,
        ROWS=choice.rows,
        SPANS=choice.block_k // 128,
        AHEAD=choice.ahead,
        num_warps=choice.num_warps,
        **pdl_options(x),
    )
    return out


hash_functions(globals())
