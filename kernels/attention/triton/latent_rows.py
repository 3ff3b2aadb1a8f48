"""MLA rows of e4m3 values with scales: their store, and their load as part of attention.

The layout of a row is that of `kernels.quant.e4m3.pack_latent`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions
from ...quant.e4m3 import LATENT_TILE, latent_row_bytes, latent_tiles
from ...quant.triton.e4m3 import to_e4m3

_TILE = tl.constexpr(LATENT_TILE)


@triton.jit
def load_latent(rows, exists, dtype: tl.constexpr, LATENT: tl.constexpr, BLOCK_D: tl.constexpr):
    """The latent values of the cached rows at `rows` [N], [N, BLOCK_D] of `dtype`.

    Zeros for rows that do not exist, and beyond LATENT.
    """
    TILE: tl.constexpr = min(_TILE, BLOCK_D)
    TILES: tl.constexpr = BLOCK_D // TILE
    dim = tl.arange(0, BLOCK_D)
    tile = tl.arange(0, TILES)
    inside = exists[:, None] & (dim < LATENT)[None, :]
    codes = tl.load(rows[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    scales = (rows + LATENT).to(tl.pointer_type(tl.float32), bitcast=True)
    has_scale = exists[:, None] & (tile * TILE < LATENT)[None, :]
    scales = tl.load(scales[:, None] + tile[None, :], mask=has_scale, other=0.0)
    N: tl.constexpr = rows.shape[0]
    values = tl.reshape(codes, [N, TILES, TILE]) * scales[:, :, None]
    return tl.reshape(values, [N, BLOCK_D]).to(dtype)


@triton.jit
def load_rotary(rows, exists, dtype: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr):
    """The rotary values of the cached rows at `rows` [N], [N, ROTARY] of `dtype`."""
    TILES: tl.constexpr = (LATENT + _TILE - 1) // _TILE
    values = (rows + (LATENT + 4 * TILES)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    at = values[:, None] + tl.arange(0, ROTARY)[None, :]
    return tl.load(at, mask=exists[:, None], other=0.0).to(dtype)


@triton.jit(
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_latent_kernel(
    row,  # [T, 1, LATENT + ROTARY]
    cache,  # [slots, 1, ROW] e4m3, contiguous
    slot_mapping,  # [T] int64
    row_stride_t,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    ROW: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,  # a power of two, at least TILES
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        source, target = row + token * row_stride_t, cache + slot * ROW
        tile = tl.arange(0, BLOCK_T)
        dim = tile[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
        values = tl.load(source + dim, mask=dim < LATENT, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(values), 1)
        # `max` may lose NaN, which must stay: the sum has it
        total = tl.sum(values * 0.0, 1)
        largest = tl.where(total != total, total, largest)
        scale = tl.div_rn(largest, tl.full([BLOCK_T], 448.0, tl.float32))
        scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
        tl.store(target + dim, to_e4m3(values, scale[:, None]), mask=dim < LATENT)
        scales = (target + LATENT).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales + tile, scale, mask=tile < TILES)
        if ROTARY > 0:
            at = tl.arange(0, BLOCK_R)
            rotary = tl.load(source + LATENT + at, mask=at < ROTARY, other=0.0)
            ends = (target + (LATENT + 4 * TILES)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
            tl.store(ends + at, rotary.to(tl.bfloat16), mask=at < ROTARY)


def store_latent(row: Tensor, kv_cache: Tensor, slot_mapping: Tensor, latent: int) -> None:
    """Write row t of `row` [T, 1, D], packed, at slot `slot_mapping[t]`; for slot -1 nothing.

    kv_cache: [num_blocks, block_size, 1, row bytes] e4m3. `latent` is a multiple of 4.
    """
    num_tokens, _, size = row.shape
    if num_tokens == 0:
        return
    rotary, tiles = size - latent, latent_tiles(latent)
    assert kv_cache.is_contiguous() and row.stride(-1) == 1, "rows must be contiguous"
    assert kv_cache.shape[-1] == latent_row_bytes(latent, rotary)
    _store_latent_kernel[(num_tokens,)](
        row,
        kv_cache,
        slot_mapping,
        row.stride(0),
        LATENT=latent,
        ROTARY=rotary,
        ROW=kv_cache.shape[-1],
        TILES=tiles,
        BLOCK_T=triton.next_power_of_2(tiles),
        BLOCK_R=triton.next_power_of_2(max(1, rotary)),
        num_warps=4,
    )


hash_functions(globals())
