"""Triton version of `kernels.attention.compressed.store_rows`, and the load of its packed rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions
from ....quant.latent_pages import PAGE_TILE, row_bytes, scale_bytes
from ....quant.triton.e4m3 import to_e4m3
from ..pages import Pages

_TILE = tl.constexpr(PAGE_TILE)


@triton.jit
def load_packed(
    cache,  # e4m3
    slot,  # [N] int64
    exists,  # [N]
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,  # of a page
    PAGE: tl.constexpr,  # bytes of a page
    SCALES: tl.constexpr,  # bytes of a row's scales
):
    """The rows in some slots of packed pages, [N, DIM] of `dtype`; zeros for those that do not
    exist."""
    ROW: tl.constexpr = 2 * DIM - LATENT
    TILE: tl.constexpr = min(_TILE, DIM)
    TILES: tl.constexpr = DIM // TILE
    N: tl.constexpr = slot.shape[0]
    dim, tile = tl.arange(0, DIM), tl.arange(0, TILES)
    page = cache + slot // ROWS * PAGE
    row, scales = page + slot % ROWS * ROW, page + (ROWS * ROW + slot % ROWS * SCALES)
    is_code = exists[:, None] & (dim < LATENT)[None, :]
    codes = tl.load(row[:, None] + dim[None, :], mask=is_code, other=0.0).to(tl.float32)
    scales = scales.to(tl.pointer_type(tl.uint8), bitcast=True)[:, None] + tile[None, :]
    has_scale = exists[:, None] & (tile * TILE < LATENT)[None, :]
    exponent = tl.load(scales, mask=has_scale, other=0).to(tl.uint32)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    values = tl.reshape(codes, [N, TILES, TILE]) * factor[:, :, None]
    ends = (row + LATENT).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    is_end = exists[:, None] & (dim >= LATENT)[None, :]
    rest = tl.load(ends[:, None] + (dim - LATENT)[None, :], mask=is_end, other=0.0)
    return tl.where(is_end, rest.to(tl.float32), tl.reshape(values, [N, DIM])).to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "positions"])
def _store_rows_kernel(
    rows,  # [M, 1, DIM]
    cache,  # [pages, PAGE] e4m3, contiguous
    slot_mapping,  # [M] int64, in tokens
    positions,  # [M] int64, or None: each row is written
    row_stride,
    RATIO: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    SCALES: tl.constexpr,
    TILES: tl.constexpr,  # a power of two
    ENDS: tl.constexpr,  # a power of two, at least ROTARY
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if positions is not None:
        ends_window = (tl.load(positions + token) + 1) % RATIO == 0
        slot = tl.where(ends_window, slot, -1)
    if slot >= 0:
        slot = slot // RATIO
        ROW: tl.constexpr = LATENT + 2 * ROTARY
        source, page = rows + token * row_stride, cache + slot // ROWS * PAGE
        target = page + slot % ROWS * ROW
        tile = tl.arange(0, TILES)
        dim = tile[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
        values = tl.load(source + dim, mask=dim < LATENT, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(values), 1), 1e-4)
        # The least power of two above or at the quotient: its exponent, rounded up.
        bits = tl.div_rn(largest, tl.full([TILES], 448.0, tl.float32)).to(tl.uint32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0).to(tl.uint32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        tl.store(target + dim, to_e4m3(values, scale[:, None]), mask=dim < LATENT)
        scales = page + (ROWS * ROW + slot % ROWS * SCALES)
        scales = scales.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(scales + tile, exponent.to(tl.uint8), mask=tile * _TILE < LATENT)
        at = tl.arange(0, ENDS)
        rotary = tl.load(source + LATENT + at, mask=at < ROTARY, other=0.0)
        ends = (target + LATENT).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(ends + at, rotary.to(tl.bfloat16), mask=at < ROTARY)


def store_rows(rows: Tensor, pages: Pages, positions: Tensor | None) -> None:
    """See `kernels.attention.compressed.store_rows.store_rows`; the pages are packed."""
    num_tokens, _, dim = rows.shape
    if num_tokens == 0:
        return
    assert pages.fp8 is not None and pages.cache.is_contiguous() and rows.stride(-1) == 1
    latent = pages.fp8.latent
    rotary = dim - latent
    _store_rows_kernel[(num_tokens,)](
        rows, pages.cache, pages.slot_mapping, positions, rows.stride(0),
        RATIO=pages.entry_tokens, LATENT=latent, ROTARY=rotary, ROWS=pages.page_rows,
        PAGE=pages.cache.shape[-1], SCALES=scale_bytes(latent),
        TILES=triton.next_power_of_2(triton.cdiv(latent, PAGE_TILE)),
        ENDS=triton.next_power_of_2(rotary), num_warps=4,
    )  # fmt: skip
    assert pages.cache.shape[-1] >= pages.page_rows * row_bytes(latent, rotary)


hash_functions(globals())
