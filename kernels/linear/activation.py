"""Gated activations for the output of a fused gate and up projection."""

from __future__ import annotations

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
