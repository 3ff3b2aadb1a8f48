"""The per-head projections before and after absorbed latent attention (MLA).

Each head has a small matrix product. The Triton version reads and writes the layout of the
neighbouring layers, [rows, heads, values], so a decode step copies nothing. BLAS needs heads
outermost and is used for many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import use_triton

_MOST_ROWS = 256  # of the Triton version; only a prefill has more


def absorb_query(query: Tensor, w_uk: Tensor, fixed: bool = False) -> Tensor:
    """Project queries into the latent space of the cache: [T, H, nope] -> [T, H, latent].

    query: [T, H, nope]; w_uk: [H, nope, latent], the key half of kv_b_proj. If `fixed`, the
    bits of a row do not depend on T.
    """
    if use_triton(query) and (fixed or query.shape[0] <= _MOST_ROWS):
        from .triton.mla import project_heads

        out: Tensor = project_heads(query, w_uk, fixed)
        return out
    return absorb_query_reference(query, w_uk)


def absorb_query_reference(query: Tensor, w_uk: Tensor) -> Tensor:
    """The plain version of `absorb_query`."""
    return torch.bmm(query.transpose(0, 1), w_uk).transpose(0, 1)


def expand_value(latent: Tensor, w_uv: Tensor, fixed: bool = False) -> Tensor:
    """Project attention outputs from the latent space to values: [T, H, latent] -> [T, H, v].

    latent: [T, H, latent]; w_uv: [H, v, latent], the value half of kv_b_proj. `fixed`: as above.
    """
    if use_triton(latent) and (fixed or latent.shape[0] <= _MOST_ROWS):
        from .triton.mla import project_heads

        out: Tensor = project_heads(latent, w_uv.transpose(1, 2), fixed)
        return out
    return expand_value_reference(latent, w_uv)


def expand_value_reference(latent: Tensor, w_uv: Tensor) -> Tensor:
    """The plain version of `expand_value`."""
    return torch.bmm(latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
