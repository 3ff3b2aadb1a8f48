"""RMSNorm of each head's output, gated: what follows the gated delta rule."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import use_triton


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension, in float32.

    x, gate: [M, heads, D], of which the last two dimensions are contiguous; weight: [D]. Returns
    [M, heads, D] in the dtype of `x`.
    """
    if use_triton(x):
        from .triton import gated_norm as triton_gated_norm

        out: Tensor = triton_gated_norm.gated_norm(x, gate, weight, eps)
        return out
    return gated_norm_reference(x, gate, weight, eps)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain version of `gated_norm`."""
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.float() * F.silu(gate.float())).to(x.dtype)
