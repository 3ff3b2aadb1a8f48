"""Gated activations for the output of a fused gate and up projection."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import use_triton


def silu_and_mul(x: Tensor, limit: float | None = None) -> Tensor:
    """Compute silu(x[:, :I]) * x[:, I:]. x: [T, 2I]; returns [T, I].

    With `limit` the gate is first bounded from above by it, and the other factor to +-`limit`.
    """
    if use_triton(x):
        from .triton import activation as triton_activation

        out: Tensor = triton_activation.silu_and_mul(x, limit)
        return out
    return silu_and_mul_reference(x, limit)


def silu_and_mul_reference(x: Tensor, limit: float | None = None) -> Tensor:
    """The plain version of `silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Compute gelu_tanh(x[:, :I]) * x[:, I:]. x: [T, 2I]; returns [T, I]."""
    if use_triton(x):
        from .triton import activation as triton_activation

        out: Tensor = triton_activation.gelu_tanh_and_mul(x)
        return out
    return gelu_tanh_and_mul_reference(x)


def gelu_tanh_and_mul_reference(x: Tensor) -> Tensor:
    """The plain version of `gelu_tanh_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
