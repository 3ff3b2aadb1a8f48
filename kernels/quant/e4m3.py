"""The number format e4m3 as KV caches hold it, in plain torch.

Values are rounded to the nearest, ties to even; values beyond 448 become 448 with their sign, and
NaN stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest e4m3 value
LATENT_TILE = 128  # latent values that share a scale
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a tile of zeros


def scale_of(largest: Tensor) -> Tensor:
    """The scale, `largest` / 448, with the rounding of kernels' divisions.

    On a GPU torch multiplies by the rounded reciprocal of a number in place of dividing by it, but
    it divides by a tensor.
    """
    return largest / torch.full_like(largest, LARGEST)


def quantise(x: Tensor, scale: float | Tensor) -> Tensor:
    """x / scale as e4m3. `scale` is a number, or a float32 tensor that broadcasts to x."""
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=torch.float32, device=x.device)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def latent_tiles(latent: int) -> int:
    """The number of scales of a latent row."""
    return -(-latent // LATENT_TILE)


def latent_row_bytes(latent: int, rotary: int) -> int:
    """Bytes of a row that `pack_latent` makes; 656 for DeepSeek V3's 512 + 64 values."""
    return latent + 4 * latent_tiles(latent) + 2 * rotary


def pack_latent(rows: Tensor, latent: int) -> Tensor:
    """Pack rows [..., latent + rotary] of MLA into bytes [..., row bytes] of dtype uint8.

    A packed row is FlashMLA's: `latent` e4m3 values, then a float32 scale for each 128 of them, the
    largest magnitude / 448, then the rotary values in bfloat16. `latent` is a multiple of 4.
    """
    values, rotary = rows.float()[..., :latent], rows[..., latent:]
    tiles = latent_tiles(latent)
    padded = torch.nn.functional.pad(values, (0, tiles * LATENT_TILE - latent))
    padded = padded.reshape(*values.shape[:-1], tiles, LATENT_TILE)
    scales = scale_of(padded.abs().amax(-1)).clamp(min=_LEAST_SCALE)  # [..., tiles]
    codes = quantise(padded, scales.unsqueeze(-1)).flatten(-2)[..., :latent]
    parts = (codes, scales, rotary.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def unpack_latent(rows: Tensor, latent: int, dtype: torch.dtype) -> Tensor:
    """The rows [..., latent + rotary] of `dtype` that packed rows [..., bytes] uint8 stand for."""
    tiles = latent_tiles(latent)
    scales_end = latent + 4 * tiles
    codes = rows[..., :latent].contiguous().view(E4M3).float()
    scales = rows[..., latent:scales_end].contiguous().view(torch.float32)
    spread = scales.repeat_interleave(LATENT_TILE, -1)[..., :latent]
    rotary = rows[..., scales_end:].contiguous().view(torch.bfloat16)
    return torch.cat([(codes * spread).to(dtype), rotary.to(dtype)], dim=-1)
