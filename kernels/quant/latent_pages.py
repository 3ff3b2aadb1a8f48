"""Pages of DeepSeek V4's rows as FlashMLA reads them: e4m3 values, and powers of two as scales.

Of a row, all values but the last `rotary` are e4m3 with a scale for each 64 of them; the others
stay bfloat16. A page holds its rows, then the scales of each row (e8m0: one byte is an exponent +
127) in a multiple of 8 bytes, then padding to whole rows. A row of 448 + 64 values has 576 bytes
and 8 bytes of scales, of which seven count: the 584 bytes a token that the package checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .e4m3 import E4M3, quantise, scale_of

PAGE_TILE = 64  # values that share a scale
_LEAST = 1e-4  # a tile's scale is that of no smaller magnitude


def row_bytes(latent: int, rotary: int) -> int:
    """Bytes of a row's values."""
    return latent + 2 * rotary


def scale_bytes(latent: int) -> int:
    """Bytes of a row's scales."""
    return -(-latent // (8 * PAGE_TILE)) * 8


def page_bytes(rows: int, latent: int, rotary: int) -> int:
    """Bytes of a page of this many rows."""
    own = row_bytes(latent, rotary)
    return -(-rows * (own + scale_bytes(latent)) // own) * own


def page_parts(cache: Tensor, rows: int, latent: int, rotary: int) -> tuple[Tensor, Tensor]:
    """The values [pages, rows, bytes] and the scales [pages, rows, bytes] of pages [pages, ...], as
    views of dtype uint8."""
    flat, own = cache.view(torch.uint8).view(cache.shape[0], -1), row_bytes(latent, rotary)
    end = rows * own
    each = scale_bytes(latent)
    shape, stride = (len(flat), rows, own), (flat.stride(0), own, 1)
    scales = flat[:, end:].as_strided((len(flat), rows, each), (flat.stride(0), each, 1))
    return flat.as_strided(shape, stride), scales


def pack_row(rows: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    """Pack rows [n, latent + rotary]: their values [n, bytes] and scales [n, bytes], both uint8.

    A scale is the least power of two with which the tile's largest magnitude is at most 448.
    """
    values, rotary = rows[:, :latent].float(), rows[:, latent:]
    tiles = -(-latent // PAGE_TILE)
    padded = torch.nn.functional.pad(values, (0, tiles * PAGE_TILE - latent))
    padded = padded.view(-1, tiles, PAGE_TILE)
    least = scale_of(padded.abs().amax(-1).clamp(min=_LEAST))
    mantissa, exponent = least.frexp()  # 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).int()  # [n, tiles]
    codes = quantise(padded, torch.ldexp(torch.ones_like(least), exponent)[..., None])
    codes = codes.flatten(1)[:, :latent].contiguous().view(torch.uint8)
    ends = rotary.to(torch.bfloat16).contiguous().view(torch.uint8)
    scales = torch.zeros(len(rows), scale_bytes(latent), dtype=torch.uint8, device=rows.device)
    scales[:, :tiles] = (exponent + 127).to(torch.uint8)
    return torch.cat((codes, ends), dim=1), scales


def unpack_row(values: Tensor, scales: Tensor, latent: int, dtype: torch.dtype) -> Tensor:
    """The rows [..., latent + rotary] of `dtype` that packed values and scales stand for."""
    codes = values[..., :latent].contiguous().view(E4M3).float()
    exponent = scales[..., : -(-latent // PAGE_TILE)].int() - 127
    spread = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    spread = spread.repeat_interleave(PAGE_TILE, -1)[..., :latent]
    ends = values[..., latent:].contiguous().view(torch.bfloat16)
    return torch.cat(((codes * spread).to(dtype), ends.to(dtype)), dim=-1)
