"""Triton versions of `kernels.linear.activation`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from .rotation import load_parts

_BLOCK = 1024


@triton.jit
def _gated_kernel(
    x,  # [T, 2 * I]
    out,  # [T, I], contiguous
    stride,  # of x's rows
    size,  # I
    limit,
    GELU: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * stride + size + column, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    u = up.to(tl.float32)
    if LIMITED:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
    if GELU:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        # (1 + tanh(z)) / 2 is the logistic function of 2 z, which loses no digits for negative z
        activated = g / (1.0 + tl.exp2(-2.0 * 1.4426950408889634 * inner))
    else:
        activated = g / (1.0 + tl.exp2(-1.4426950408889634 * g))
    # round between the two steps, as the reference does
    activated = activated.to(gate.dtype).to(tl.float32) * u
    tl.store(out + row * size + column, activated.to(gate.dtype), mask=inside)


def _gated(x: Tensor, gelu: bool, limit: float | None = None) -> Tensor:
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, _BLOCK))
        _gated_kernel[grid](
            x, out, x.stride(0), size, limit or 0.0,
            GELU=gelu, LIMITED=limit is not None, BLOCK=_BLOCK, **pdl_options(x),
        )  # fmt: skip
    return out


def silu_and_mul(x: Tensor, limit: float | None = None) -> Tensor:
    """See `kernels.linear.activation.silu_and_mul`."""
    return _gated(x, gelu=False, limit=limit)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See `kernels.linear.activation.gelu_tanh_and_mul`."""
    return _gated(x, gelu=True)


@triton.jit
def _sigmoid_gate_kernel(
    x,  # [M, HEADS, DIM]
    gate,  # [M, HEADS, DIM], or PARTS of it
    out,  # [M, HEADS * DIM], contiguous
    x_stride,  # from token to token
    x_head_stride,
    gate_stride,
    gate_head_stride,
    part_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = whole
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < HEADS * DIM
    head, dim = place // DIM, place % DIM
    wait_for_inputs(PDL)
    own = tl.load(x + token * x_stride + head * x_head_stride + dim, mask=inside, other=0.0)
    at = gate + token * gate_stride + head * gate_head_stride + dim
    z = load_parts(at, inside, part_stride, PARTS).to(tl.float32)
    result = own.to(tl.float32) / (1.0 + tl.exp(-z))
    tl.store(out + token * (HEADS * DIM) + place, result.to(own.dtype), mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `kernels.linear.activation.sigmoid_gate`."""
    tokens, heads, dim = x.shape
    parts = gate.shape[0] if gate.dim() == 4 else 0
    part_stride, own = (gate.stride(0), gate[0]) if parts else (0, gate)
    assert x.stride(2) == own.stride(2) == 1
    out = torch.empty(tokens, heads * dim, dtype=x.dtype, device=x.device)
    if tokens:
        _sigmoid_gate_kernel[(tokens, triton.cdiv(heads * dim, _BLOCK))](
            x, own, out, x.stride(0), x.stride(1), own.stride(0), own.stride(1), part_stride,
            HEADS=heads, DIM=dim, PARTS=parts, BLOCK=_BLOCK, **pdl_options(x),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rows_kernel(
    x,  # [M, K]
    gate,  # [K]
    rows,  # [M, N], or [PARTS, M, N] float32
    residual,  # [M, N]
    out,  # [M, N]
    x_stride,
    num_rows,  # M
    K: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = whole
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    k, n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
    weight = tl.load(gate + k, mask=k < K, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    own = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-tl.sum(own * weight, 0)))
    value = load_parts(rows + row * N + n, n < N, num_rows * N, PARTS).to(tl.float32)
    value *= share
    if ADD:
        value += tl.load(residual + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, value.to(out.dtype.element_ty), mask=n < N)


def gated_rows(
    x: Tensor, gate: Tensor, rows: Tensor, out: Tensor, residual: Tensor | None = None
) -> None:
    """See `kernels.linear.activation.gated_rows`."""
    assert rows.is_contiguous() and out.is_contiguous() and x.stride(1) == gate.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    num_rows, size = out.shape
    if num_rows:
        _gated_rows_kernel[(num_rows,)](
            x, gate, rows, out if residual is None else residual, out, x.stride(0), num_rows,
            K=x.shape[1], N=size, PARTS=rows.shape[0] if rows.dim() == 3 else 0,
            BLOCK_K=triton.next_power_of_2(x.shape[1]), BLOCK=triton.next_power_of_2(size),
            ADD=residual is not None, num_warps=8, **pdl_options(x),
        )  # fmt: skip


hash_functions(globals())
