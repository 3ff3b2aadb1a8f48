"""The per-head projections before and after absorbed latent attention (MLA).

Each head has a small matrix product. The Triton version reads and writes the layout of the
neighbouring layers, [rows, heads, values], so a decode step copies nothing. BLAS needs heads
outermost and is used for many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operation import operation

_MOST_ROWS = 256  # of the Triton version; only a prefill has more


def absorb_query(query: Tensor, w_uk: Tensor, fixed: bool = False) -> Tensor:
    """Project queries into the latent space of the cache: [T, H, nope] -> [T, H, latent].

    query: [T, H, nope]; w_uk: [H, nope, latent], the key half of kv_b_proj. If `fixed`, the
    bits of a row do not depend on T.
    """
    return project_heads(query, w_uk, fixed)


def expand_value(latent: Tensor, w_uv: Tensor, fixed: bool = False) -> Tensor:
    """Project attention outputs from the latent space to values: [T, H, latent] -> [T, H, v].

    latent: [T, H, latent]; w_uv: [H, v, latent], the value half of kv_b_proj. `fixed`: as above.
    """
    return project_heads(latent, w_uv.transpose(1, 2), fixed)


def project_heads_reference(x: Tensor, weight: Tensor, fixed: bool = False) -> Tensor:
    """Multiply x [T, H, K] by weight [H, K, N], head by head; returns [T, H, N]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def _has_kernel(x: Tensor, weight: Tensor, fixed: bool = False) -> bool:
    return fixed or x.shape[0] <= _MOST_ROWS


project_heads = operation(project_heads_reference, "x", ".triton.mla", _has_kernel)
