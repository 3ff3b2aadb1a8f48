"""Triton versions of `kernels.linear.activation`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs

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
