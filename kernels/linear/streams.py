"""Small kernels between layers: sums into a residual stream, and two norms side by side.

Each replaces several torch operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operation import operation
from .norm_rope import rms_norm_reference


def write_stream_reference(
    hidden: Tensor, residual: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Compute hidden + residual, [M, H], and write it to `out` if given; returns it.

    hidden: [M, H], or with a `residual` also float32 parts [S, M, H] to sum; residual: [M, H],
    None = 0; out: [M, H], with any row stride. Without both, it returns `hidden` itself.
    """
    if residual is not None and hidden.dim() > residual.dim():
        hidden = (hidden.float().sum(0) + residual).to(residual.dtype)
    elif residual is not None:
        return torch.add(hidden, residual, out=out)  # a single operation
    return hidden if out is None else out.copy_(hidden)


write_stream = operation(
    write_stream_reference,
    "hidden",
    ".triton.streams",
    lambda hidden, residual, out=None: residual is not None or out is not None,
)


def norm_pair_reference(
    left: Tensor,
    right: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    ids: Tensor | None = None,
) -> Tensor:
    """Concatenate left and right to [M, 2H], after an RMS norm of each if `weights` are given.

    left: [M, H], or a table [V, H] from which `ids`, [M] int32 or int64, selects rows;
    right: [M, H]; weights: two [H].
    """
    if ids is not None:
        left = F.embedding(ids, left).to(right.dtype)
    if weights is not None:
        left = rms_norm_reference(left, weights[0], eps)
        right = rms_norm_reference(right, weights[1], eps)
    return torch.cat([left, right], dim=-1)


norm_pair = operation(norm_pair_reference, "right", ".triton.streams")
