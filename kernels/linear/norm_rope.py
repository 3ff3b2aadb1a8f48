"""RMSNorm (with and without residual addition) and rotary position embedding."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..device import use_triton
from ..operation import operation
from .rotation import Rotation


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., H]; weight: [H], None = 1. The arithmetic is float32, and the result has the dtype of
    `x`. It is written to `out`, which must be contiguous, if given.
    """
    if weight is not None and use_triton(x):
        from .triton import norm_rope as triton_norm_rope

        normed: Tensor = triton_norm_rope.rms_norm(x, weight, eps, out)
        return normed
    return _kept(rms_norm_reference(x, weight, eps), out)


def _kept(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The plain version of `rms_norm`."""
    size = x.shape[-1]
    wide = x.float()
    # a vector norm is one pass; torch's own rms_norm needs twice the time for few rows on a CPU
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    if norm.is_cpu:  # one operation instead of three, since few rows cost what their calls cost
        inverse = torch.addcmul(_scalar(eps), norm, norm, value=1 / size).rsqrt_()
    else:
        inverse = norm.square_().mul_(1 / size).add_(eps).rsqrt_()
    if weight is None:
        return (wide * inverse).to(x.dtype)
    if x.dtype == torch.float32:
        return (wide * weight).mul_(inverse)
    normed = wide * inverse
    if weight.dtype == torch.float32:  # a weight kept exact is applied before rounding
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight.to(x.dtype)


@lru_cache(maxsize=16)
def _scalar(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


def fused_add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    stream: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute rms_norm(x + residual) and x + residual, both [T, H].

    x: [T, H], or parts [S, T, H] to sum in float32; residual: [T, H], or a larger matrix from which
    `rows` [T] int64 selects rows. The results are written to `out`, which must be contiguous, and
    `stream`, if given.
    """
    if rows is not None:
        residual = residual[rows]
    if x.dim() > residual.dim():
        total = (x.float().sum(0) + residual).to(residual.dtype)
    else:
        total = x + residual
    return _kept(rms_norm_reference(total, weight, eps), out), _kept(total, stream)


fused_add_rms_norm = operation(fused_add_rms_norm_reference, "x", ".triton.norm_rope")


def rotary_embedding_reference(
    query: Tensor, key: Tensor | None, rotation: Rotation
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first `rot_dim` dims of each head by its token's position; norms are left out.

    query: [T, Hq, D]; key: [T, Hk, D] or None. Returns both rotated, in the same shapes.
    """
    positions, interleaved = rotation.positions[: query.shape[0]], rotation.interleaved
    cos, sin = rotary_factors(positions, rotation.cos_sin_cache, interleaved)
    rotated_key = None if key is None else apply_rotary(key, cos, sin, interleaved)
    return apply_rotary(query, cos, sin, interleaved), rotated_key


rotary_embedding = operation(rotary_embedding_reference, "query", ".triton.norm_rope")


def rotary_factors(
    positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The cosine and signed sine of each token, both [T, 1, rot_dim] float32, for all layers.

    With these signs a rotation is x * cos + swapped(x) * sin, where `swapped` swaps the two members
    of each pair.
    """
    cos, sin = cos_sin_cache.index_select(0, positions).float().chunk(2, dim=-1)
    if interleaved:
        cos = cos.repeat_interleave(2, dim=-1)
        sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
    return cos.unsqueeze(1), sin.unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x [T, H, D] by the factors of `rotary_factors`, in float32; keeps the dtype of `x`."""
    rot_dim = cos.shape[-1]
    rotated = (x if rot_dim == x.shape[-1] else x[..., :rot_dim]).float()
    if interleaved:
        swapped = rotated.reshape(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        swapped = rotated.roll(rot_dim // 2, -1)
    rotated = torch.addcmul(rotated * cos, swapped, sin).to(x.dtype)
    if rot_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rot_dim:]), dim=-1)
