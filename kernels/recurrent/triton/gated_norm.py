"""Triton version of `kernels.recurrent.gated_norm`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["gate_stride"])
def _gated_norm_kernel(
    x,  # [M, heads, D]
    gate,  # [M, heads, D]
    weight,  # [D]
    out,  # [M, heads, D], contiguous
    x_stride,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    own = tl.load(x + token * x_stride + head * DIM + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + head * DIM + at, mask=inside, other=0.0)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    own = own * tl.rsqrt(tl.sum(own * own, 0) / DIM + eps) * gain
    z = z.to(tl.float32)
    own = own * z * tl.sigmoid(z)
    target = out + (token * HEADS + head) * DIM + at
    tl.store(target, own.to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.recurrent.gated_norm.gated_norm`."""
    tokens, heads, dim = x.shape
    assert x.stride()[1:] == gate.stride()[1:] == (dim, 1), "a token's heads must be contiguous"
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if tokens:
        _gated_norm_kernel[(tokens, heads)](
            x, gate, weight, out, x.stride(0), gate.stride(0), eps,
            HEADS=heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return out
