"""RMSNorm of each head's output, gated: what follows the gated delta rule."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..operation import operation


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension, in float32.

    x, gate: [M, heads, D], of which the last two dimensions are contiguous; weight: [D]. Returns
    [M, heads, D] in the dtype of `x`.
    """
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.float() * F.silu(gate.float())).to(x.dtype)


gated_norm = operation(gated_norm_reference, "x", ".triton.gated_norm")
