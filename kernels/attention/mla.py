"""The per-head projections before and after absorbed latent attention (MLA).

Each head has a small matrix product. The Triton version reads and writes the layout of the
neighbouring layers, [rows, heads, values], so a decode step copies nothing. BLAS needs heads
outermost and is used for many rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import use_triton
from ..linear.norm_rope import rms_norm, rotary_embedding
from ..linear.rotation import Rotation

_MOST_ROWS = 256  # of the Triton version; only a prefill has more


def queries_and_rows(
    heads: Tensor,
    down: Tensor,
    w_uk: Tensor,
    rotation: Rotation,
    norm: tuple[Tensor, float],
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries [T, H, latent + rope] and cached rows [T, 1, latent + rope] of latent attention.

    heads: [T, H, nope + rope], projected queries; down: [T, latent + rope], a token's latent and
    the key that all heads share; w_uk and `fixed`: as in `absorb_query`; `norm`: weight [latent]
    and eps of the latent's norm. The last `rope` values of each are rotated.
    """
    nope, latent = w_uk.shape[1:]
    if use_triton(heads):
        from .triton.mla import latent_rows

        shape = (*heads.shape[:2], down.shape[1])
        query = torch.empty(shape, dtype=heads.dtype, device=heads.device)
        absorb_query(heads[..., :nope], w_uk, fixed, query[..., :latent])
        row: Tensor = latent_rows(heads[..., nope:], down, query, rotation, *norm)
        return query, row
    return queries_and_rows_reference(heads, down, w_uk, rotation, norm, fixed)


def queries_and_rows_reference(
    heads: Tensor,
    down: Tensor,
    w_uk: Tensor,
    rotation: Rotation,
    norm: tuple[Tensor, float],
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The plain version of `queries_and_rows`."""
    nope, latent = w_uk.shape[1:]
    turned, key = rotary_embedding(heads[..., nope:], down[:, latent:].unsqueeze(1), rotation)
    assert key is not None
    query = torch.cat((absorb_query(heads[..., :nope], w_uk, fixed), turned), dim=-1)
    return query, torch.cat((rms_norm(down[:, :latent], *norm).unsqueeze(1), key), dim=-1)


def absorb_query(
    query: Tensor, w_uk: Tensor, fixed: bool = False, out: Tensor | None = None
) -> Tensor:
    """Project queries into the latent space of the cache: [T, H, nope] -> [T, H, latent].

    query: [T, H, nope]; w_uk: [H, nope, latent], the key half of kv_b_proj. If `fixed`, the
    bits of a row do not depend on T. The result is written into `out` if that is given.
    """
    if use_triton(query) and (fixed or query.shape[0] <= _MOST_ROWS):
        from .triton.mla import project_heads

        result: Tensor = project_heads(query, w_uk, fixed, out)
        return result
    result = absorb_query_reference(query, w_uk)
    return result if out is None else out.copy_(result)


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
