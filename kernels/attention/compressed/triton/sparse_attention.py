"""Triton version of `kernels.attention.compressed.sparse_attention`: some heads of a token each."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions
from ....quant.latent_pages import scale_bytes
from ...triton.latent_rows import load_latent, load_rotary
from ..pages import Pages, SlotList
from .store_rows import load_packed


@triton.jit
def _add_rows(
    total,  # [HEADS, DIM]
    mass,  # [HEADS]
    most,  # [HEADS]
    query,  # [HEADS, DIM]
    query_rest,  # [HEADS, REST]
    cache,  # [slots, WIDTH]
    slots,  # of this token
    count,
    scale,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    channel = tl.arange(0, DIM)
    for start in range(0, count, ROWS):
        place = start + tl.arange(0, ROWS)
        inside = place < count
        slot = tl.load(slots + place, mask=inside, other=0).to(tl.int64)
        row = cache + slot * WIDTH
        if LATENT > 0:
            rows = load_packed(
                cache, slot, inside, query.dtype, DIM, LATENT, PAGE_ROWS, WIDTH, SCALES
            )
        elif PACKED:
            rows = load_latent(row, inside, query.dtype, DIM, DIM)
        else:
            rows = tl.load(row[:, None] + channel[None, :], mask=inside[:, None], other=0)
        score = tl.dot(query, tl.trans(rows), input_precision=PRECISION)
        if REST > 0:
            if PACKED:
                rest = load_rotary(row, inside, query.dtype, DIM, REST)
            else:
                beyond = DIM + tl.arange(0, REST)
                rest = tl.load(row[:, None] + beyond[None, :], mask=inside[:, None], other=0)
            score = tl.dot(query_rest, tl.trans(rest), score, input_precision=PRECISION)
        score = score * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        greatest = tl.maximum(most, tl.max(score, axis=1))
        share = tl.exp(score - greatest[:, None])
        shrink = tl.exp(most - greatest)
        mass = mass * shrink + tl.sum(share, axis=1)
        total = total * shrink[:, None]
        total = tl.dot(share.to(rows.dtype), rows, total, input_precision=PRECISION)
        most = greatest
    return total, mass, most


@triton.jit(
    do_not_specialize=["window_width", "chosen_width"],
    do_not_specialize_on_alignment=["window", "window_counts", "chosen", "chosen_counts"],
)
def _sparse_attention_kernel(
    query,  # [M, heads, DIM + REST], contiguous
    out,  # [M, heads, DIM], contiguous
    raw,  # [slots, WIDTH]
    window,  # [M, window_width] int32
    window_counts,  # [M] int32
    window_width,
    entries,  # [slots, WIDTH]
    chosen,  # [M, chosen_width] int32
    chosen_counts,  # [M] int32
    chosen_width,
    sinks,  # [heads] float32, or None
    scale,
    num_heads,
    DIM: tl.constexpr,  # of a value
    REST: tl.constexpr,  # of a key, beyond the value
    WIDTH: tl.constexpr,  # elements of a row; of a page, if pages are packed
    MORE_WIDTH: tl.constexpr,  # the same of `entries`
    PACKED: tl.constexpr,
    LATENT: tl.constexpr,  # values that are e4m3, if pages are packed
    PAGE_ROWS: tl.constexpr,
    MORE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,  # bytes of a row's scales
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < num_heads
    first = query + (token * num_heads + head[:, None]) * (DIM + REST)
    own = tl.load(first + tl.arange(0, DIM)[None, :], mask=inside[:, None], other=0.0)
    own_rest = own
    if REST > 0:
        beyond = DIM + tl.arange(0, REST)[None, :]
        own_rest = tl.load(first + beyond, mask=inside[:, None], other=0.0)
    if sinks is not None:  # the sink is the first logit
        most = tl.load(sinks + head, mask=inside, other=0.0)
        mass = tl.full([HEADS], 1.0, tl.float32)
    else:
        most = tl.full([HEADS], float("-inf"), tl.float32)
        mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, DIM], tl.float32)
    total, mass, most = _add_rows(
        total, mass, most, own, own_rest, raw, window + token * window_width,
        tl.load(window_counts + token), scale, DIM, REST, WIDTH, PACKED, LATENT, PAGE_ROWS, SCALES,
        ROWS, PRECISION,
    )  # fmt: skip
    if HAS_ENTRIES:
        total, mass, most = _add_rows(
            total, mass, most, own, own_rest, entries, chosen + token * chosen_width,
            tl.load(chosen_counts + token), scale, DIM, REST, MORE_WIDTH, PACKED, LATENT, MORE_ROWS,
            SCALES, ROWS, PRECISION,
        )  # fmt: skip
    result = total / mass[:, None]
    at = (token * num_heads + head[:, None]) * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside[:, None])


def sparse_attention(
    query: Tensor,
    raw: Pages,
    window: SlotList,
    entries: Pages | None,
    chosen: SlotList | None,
    sinks: Tensor | None,
    scale: float,
    dim_v: int | None = None,
) -> Tensor:
    """See `kernels.attention.compressed.sparse_attention.sparse_attention`."""
    num_tokens, num_heads, size = query.shape
    dim = dim_v or size
    rest = size - dim
    out = query.new_empty((num_tokens, num_heads, dim))
    if num_tokens == 0:
        return out
    assert query.is_contiguous() and raw.cache.is_contiguous()
    assert dim & (dim - 1) == 0 and rest & (rest - 1) == 0
    more, listed = (raw, window) if entries is None or chosen is None else (entries, chosen)
    heads = min(32, max(16, triton.next_power_of_2(num_heads)))
    wide = query.dtype == torch.float32
    latent = raw.fp8.latent if raw.fp8 is not None and raw.fp8.paged else 0
    _sparse_attention_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        query, out, raw.cache, window.slots, window.counts, window.slots.shape[1],
        more.cache, listed.slots, listed.counts, listed.slots.shape[1], sinks, scale, num_heads,
        DIM=dim, REST=rest, WIDTH=raw.cache.shape[-1], MORE_WIDTH=more.cache.shape[-1],
        PACKED=raw.fp8 is not None, LATENT=latent, PAGE_ROWS=raw.page_rows,
        MORE_ROWS=more.page_rows, SCALES=scale_bytes(latent),
        HEADS=heads, ROWS=16 if wide else 32, HAS_ENTRIES=entries is not None,
        PRECISION="tf32x3" if wide else "tf32", num_warps=8, num_stages=1 if wide else 2,
    )  # fmt: skip
    return out


hash_functions(globals())
