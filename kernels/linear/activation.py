"""Gated activations: of a fused gate and up projection, and of attention's heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operation import operation


def silu_and_mul_reference(x: Tensor, limit: float | None = None) -> Tensor:
    """Compute silu(x[:, :I]) * x[:, I:]. x: [T, 2I]; returns [T, I].

    With `limit` the gate is first bounded from above by it, and the other factor to +-`limit`.
    """
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate).mul_(up)


silu_and_mul = operation(silu_and_mul_reference, "x", ".triton.activation")


def gelu_tanh_and_mul_reference(x: Tensor) -> Tensor:
    """Compute gelu_tanh(x[:, :I]) * x[:, I:]. x: [T, 2I]; returns [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


gelu_tanh_and_mul = operation(gelu_tanh_and_mul_reference, "x", ".triton.activation")

GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """Compute x * sigmoid(gate). x: [M, heads, D]; gate: the same, or float32 parts [S, M, heads,
    D], which are summed first. Returns [M, heads * D]."""
    if gate.dim() == 4:  # one after the other: the order of torch's sum depends on M
        gate = functools.reduce(torch.add, gate).to(x.dtype)
    return (x * gate.sigmoid()).flatten(1)


sigmoid_gate = operation(sigmoid_gate_reference, "x", ".triton.activation")


def gated_rows_reference(
    x: Tensor, gate: Tensor, rows: Tensor, out: Tensor, residual: Tensor | None = None
) -> None:
    """Write sigmoid(x . gate) * rows, plus `residual` [M, N] if given, to `out` [M, N].

    x: [M, K]; gate: [1, K]; rows: [M, N], or float32 parts [S, M, N], which are summed first.
    """
    if rows.dim() == 3:
        rows = functools.reduce(torch.add, rows)
    gated = rows.float() * (x.float() @ gate[0].float()).sigmoid().unsqueeze(1)
    out.copy_(gated if residual is None else residual + gated)


gated_rows = operation(gated_rows_reference, "x", ".triton.activation")
