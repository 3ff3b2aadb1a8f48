"""RMSNorm of each head's output, gated: what follows the gated delta rule.

On a GPU a kernel of `gated_delta` computes it beside the log.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .rows import DeltaShape, OutputGate


def gated_norm(x: Tensor, shape: DeltaShape, gate: OutputGate) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight * silu(gate) for each head, in float32.

    x: [M, value heads * value_dim]; returns the same in its dtype.
    """
    heads = (x.shape[0], shape.num_value_heads, shape.value_dim)
    wide = x.view(heads).float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + gate.eps).rsqrt()
    result = normed * gate.weight.float() * F.silu(gate.values.view(heads).float())
    return result.to(x.dtype).flatten(1)
