"""Norms heads and rotates their last values, as DeepSeek V4 does before and after attention.

Values carry the rotation of their keys, so an attention output is rotated back by its query's
position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...linear.norm_rope import apply_rotary, rms_norm_reference, rotary_factors
from ...operation import operation


def tail_rotary_reference(
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float | None = None,
    weight: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """Rotate the last rot_dim values of each head by its token's position, in pairs (2i, 2i + 1).

    x: [M, heads, D]; positions: [M] int64; cos_sin_cache: [positions, rot_dim] float32, cosines
    first. With `eps` each head is RMS-normed first, with `weight` [D] float32 or without one.
    `inverse` rotates by the negative angle. Returns [M, heads, D], contiguous.
    """
    if eps is not None:
        x = rms_norm_reference(x, weight, eps)
    cos, sin = rotary_factors(positions, cos_sin_cache, interleaved=True)
    rest = x.shape[-1] - cos_sin_cache.shape[-1]
    tail = apply_rotary(x[..., rest:], cos, -sin if inverse else sin, interleaved=True)
    return torch.cat((x[..., :rest], tail), dim=-1)


tail_rotary = operation(tail_rotary_reference, "x", ".triton.tail_rotary")
