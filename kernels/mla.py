"""The per-head projections around absorbed latent attention (MLA).

Both are batched matrix products over heads, which the BLAS of either device does well; there is no
Triton version.
"""

from __future__ import annotations

import torch
from torch import Tensor


def absorb_query(query: Tensor, w_uk: Tensor) -> Tensor:
    """Bring queries into the latent space of the cache: query [T, H, nope] -> [T, H, latent].

    w_uk: [H, nope, latent], the key half of kv_b_proj.
    """
    return torch.bmm(query.transpose(0, 1), w_uk).transpose(0, 1)


def expand_value(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Bring attended latents out again: latent [T, H, latent] -> [T, H, v].

    w_uv: [H, v, latent], the value half of kv_b_proj.
    """
    return torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
