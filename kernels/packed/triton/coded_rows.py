"""Triton kernels that write coded rows (see `packed.coded`): of numbers, and of a norm's output.

The two halves of a span are loaded as two tiles and joined code by code: that is the order of the
bytes of packed words, and no code moves to another thread.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...linear.triton.gemv import gated
from ...linear.triton.rotation import load_parts
from ...quant.triton.e4m3 import to_e4m3
from ..coding import SPAN, Coding


@triton.jit
def codes_of(value, inverse, HARDWARE: tl.constexpr):
    """value * inverse as e4m3; the interpreter, which lacks the instruction, computes its bits."""
    scaled = value * inverse
    if HARDWARE:
        code = scaled.to(tl.float8e4nv)
    else:
        code = to_e4m3(scaled, 1.0)
    return code


@triton.jit
def _store_codes(
    out,  # [M, code_stride] e4m3
    scales,  # [M, scale_stride] float32; PLANAR: [spans, group_stride]
    a,  # [SPANS, 64], the first halves of spans, in float32
    b,
    row,
    span,  # [SPANS]
    num_spans,
    code_stride,
    scale_stride,
    group_stride,
    BY_GROUP: tl.constexpr,
    PLANAR: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    inside = span < num_spans
    largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))  # [SPANS]
    tail = scales + row * scale_stride
    if BY_GROUP:
        scale = tl.div_rn(tl.maximum(largest, 1e-12), 448.0)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
        tl.store(tail + (span * group_stride if PLANAR else span), scale, mask=inside)
    else:
        scale = tl.div_rn(tl.maximum(tl.max(largest, 0), 1e-12), 448.0)
        inverse = tl.div_rn(1.0, scale)
        tl.store(tail, scale)
    codes = tl.join(codes_of(a, inverse, HARDWARE), codes_of(b, inverse, HARDWARE))
    codes = tl.reshape(codes, [a.shape[0], 128])
    at = row * code_stride + span[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, codes, mask=inside[:, None])


@triton.jit(do_not_specialize=["group_stride"])
def _code_rows_kernel(
    x,  # [M, K]; GATED: [M, 2 K]
    out,  # [M, code_stride] e4m3
    scales,  # [M, scale_stride] float32; PLANAR and BY_GROUP: [spans, group_stride]
    num_inputs,  # K
    code_stride,
    scale_stride,
    group_stride,
    SPANS: tl.constexpr,  # of a program; without BY_GROUP all of a row
    BY_GROUP: tl.constexpr,
    PLANAR: tl.constexpr,
    GATED: tl.constexpr,  # what is coded is act(gate) * up of the two halves
    ACTIVATION: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    column = span[:, None] * 128 + tl.arange(0, 64)[None, :]
    source = x + row * num_inputs * (2 if GATED else 1) + column
    first, second = column < num_inputs, column + 64 < num_inputs
    wait_for_inputs(PDL)
    a = tl.load(source, mask=first, other=0.0).to(tl.float32)
    b = tl.load(source + 64, mask=second, other=0.0).to(tl.float32)
    if GATED:
        dtype: tl.constexpr = x.dtype.element_ty
        up = tl.load(source + num_inputs, mask=first, other=0.0).to(tl.float32)
        a = gated(a, up, ACTIVATION).to(dtype).to(tl.float32)
        up = tl.load(source + num_inputs + 64, mask=second, other=0.0).to(tl.float32)
        b = gated(b, up, ACTIVATION).to(dtype).to(tl.float32)
    spans = tl.cdiv(num_inputs, 128)
    _store_codes(
        *(out, scales, a, b, row, span, spans, code_stride, scale_stride, group_stride),
        *(BY_GROUP, PLANAR, HARDWARE),
    )


@triton.jit
def _stream(
    x, residual, stream, at, other_at, inside, size, ADD: tl.constexpr, PARTS: tl.constexpr
):
    """The sum of x and the residual, which is stored, in float32."""
    dtype: tl.constexpr = stream.dtype.element_ty
    value = load_parts(x + at, inside, size, PARTS)
    if ADD:
        other = tl.load(residual + other_at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(stream + at, value, mask=inside)
    return value.to(tl.float32)


@triton.jit
def _normed(value, scale, gain, dtype: tl.constexpr):
    normed = value * scale
    if gain.dtype != tl.float32:  # a float32 weight is applied before rounding
        normed = normed.to(dtype).to(tl.float32)
    return (normed * gain.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "group_stride"])
def _norm_and_code_kernel(
    x,  # [M, H]; PARTS: [PARTS, M, H] float32
    residual,  # [M, H]
    weight,  # [H]
    out,  # [M, code_stride] e4m3
    scales,  # [M, scale_stride] float32; PLANAR and BY_GROUP: [spans, group_stride]
    stream,  # [M, H]
    residual_stride,
    num_rows,  # M
    code_stride,
    scale_stride,
    group_stride,
    eps,
    SIZE: tl.constexpr,  # H
    SPANS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = x is whole
    BY_GROUP: tl.constexpr,
    PLANAR: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = stream.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    column = span[:, None] * 128 + tl.arange(0, 64)[None, :]
    first, second = column < SIZE, column + 64 < SIZE
    gain_a = tl.load(weight + column, mask=first, other=0.0)
    gain_b = tl.load(weight + column + 64, mask=second, other=0.0)
    wait_for_inputs(PDL)
    at, of, size = row * SIZE + column, row * residual_stride + column, num_rows * SIZE
    a = _stream(x, residual, stream, at, of, first, size, ADD, PARTS)
    b = _stream(x, residual, stream, at + 64, of + 64, second, size, ADD, PARTS)
    scale = tl.rsqrt(tl.sum(tl.sum(a * a + b * b, 1), 0) / SIZE + eps)
    a, b = _normed(a, scale, gain_a, dtype), _normed(b, scale, gain_b, dtype)
    spans = tl.cdiv(SIZE, 128)
    _store_codes(
        *(out, scales, a, b, row, span, spans, code_stride, scale_stride, group_stride),
        *(BY_GROUP, PLANAR, HARDWARE),
    )


def empty_rows(x: Tensor, rows: int, coding: Coding) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for coded rows on the device of x: as bytes, as codes, as scales, the last two flat
    from the first row's on."""
    coded = torch.empty(rows, coding.width(rows), dtype=torch.uint8, device=x.device)
    flat, (first, _) = coded.view(-1), coding.scales_at(rows)
    return coded, flat.view(torch.float8_e4m3fn), flat.view(torch.float32)[first:]


def code_rows(x: Tensor, coding: Coding, activation: str | None = None) -> Tensor:
    """See `packed.coded.code_rows`; with an activation, it codes what that makes of x [M, 2 K]."""
    assert x.is_contiguous() and x.shape[1] == coding.columns * (1 if activation is None else 2)
    coded, codes, scales = empty_rows(x, x.shape[0], coding)
    spans = 8 if coding.by_group else triton.next_power_of_2(coding.spans)
    _code_rows_kernel[(x.shape[0], triton.cdiv(coding.spans, spans))](
        x,
        codes,
        scales,
        coding.columns,
        coding.code_stride,
        coding.scales_at(x.shape[0])[1],
        coding.in_planes(x.shape[0]),
        SPANS=spans,
        BY_GROUP=coding.by_group,
        PLANAR=coding.planar,
        GATED=activation is not None,
        ACTIVATION=int(activation == "gelu_tanh"),
        HARDWARE=not x.is_cpu,
        num_warps=_warps(spans),
        **pdl_options(x),
    )
    return coded


def gate_and_code(x: Tensor, activation: str, coding: Coding) -> Tensor:
    """See `packed.coded.gate_and_code`."""
    return code_rows(x, coding, activation)


def norm_and_code(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, coding: Coding
) -> tuple[Tensor, Tensor]:
    """See `packed.coded.norm_and_code`."""
    rows, size = x.shape[-2:]
    assert x.is_contiguous() and size == coding.columns
    parts = x.shape[0] if x.dim() == 3 else 0
    assert not parts or residual is not None
    stream = x
    if residual is not None:
        assert residual.stride(1) == 1, "rows must be contiguous"
        stream = torch.empty(rows, size, dtype=residual.dtype, device=x.device)
    coded, codes, scales = empty_rows(x, rows, coding)
    spans = triton.next_power_of_2(coding.spans)
    _norm_and_code_kernel[(rows,)](
        x,
        stream if residual is None else residual,
        weight,
        codes,
        scales,
        stream,
        size if residual is None else residual.stride(0),
        rows,
        coding.code_stride,
        coding.scales_at(rows)[1],
        coding.in_planes(rows),
        eps,
        SIZE=size,
        SPANS=spans,
        ADD=residual is not None,
        PARTS=parts,
        BY_GROUP=coding.by_group,
        PLANAR=coding.planar,
        HARDWARE=not x.is_cpu,
        num_warps=_warps(spans),
        **pdl_options(x),
    )
    return coded, stream


def _warps(spans: int) -> int:
    """Warps of a program that codes so many spans: 16 columns a thread, if it has not too many."""
    return min(max(spans * SPAN // 512, 1), 16)


hash_functions(globals())
