"""Triton version of `kernels.attention.compressed.sparse_attention`: some heads of a token each.

Where few tokens leave most of the GPU idle, several programs share a token's rows, and a second
kernel combines their results.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....device import num_processors
from ....launch import hash_functions
from ....quant.latent_pages import scale_bytes
from ...triton.attention_plan import num_splits
from ...triton.latent_rows import load_latent, load_rotary
from ...triton.split_sums import sum_splits
from ..pages import Pages, SlotList
from .store_rows import load_packed

_LEAST_ROWS = 64  # of a split with work; one with fewer costs more than it saves
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_rows(
    total,  # [HEADS, DIM]
    mass,  # [HEADS]
    most,  # [HEADS]
    query,  # [HEADS, DIM]
    query_rest,  # [HEADS, REST]
    cache,  # [slots, WIDTH]
    slots,  # of this token
    first,  # place in them
    end,
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
    for start in range(first, end, ROWS):
        place = start + tl.arange(0, ROWS)
        inside = place < end
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
    do_not_specialize=["window_width", "chosen_width", "splits", "num_tokens"],
    do_not_specialize_on_alignment=["window", "window_counts", "chosen", "chosen_counts"],
)
def _sparse_attention_kernel(
    query,  # [M, heads, DIM + REST], contiguous
    out,  # [M, heads, DIM], contiguous; [splits, M, heads, DIM] float32 if SPLIT
    lse,  # [splits, M, heads] float32 if SPLIT, to base 2; -inf where a split has no rows
    num_tokens,  # M
    splits,
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
    SPLIT: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
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
    near = tl.load(window_counts + token)  # the rows of the window come first, then the entries
    count = near
    if HAS_ENTRIES:
        count += tl.load(chosen_counts + token)
    first, end = 0, count
    flat = token * num_heads + head
    if SPLIT:
        split = tl.program_id(2)
        length = tl.maximum(tl.cdiv(count, splits), LEAST_ROWS)
        first = split * (tl.cdiv(length, ROWS) * ROWS)
        end = tl.minimum(count, first + tl.cdiv(length, ROWS) * ROWS)
        flat += split.to(tl.int64) * num_tokens * num_heads
        if split > 0:  # the first split has the sink
            most = tl.full([HEADS], float("-inf"), tl.float32)
            mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, DIM], tl.float32)
    total, mass, most = _add_rows(
        total, mass, most, own, own_rest, raw, window + token * window_width,
        first, tl.minimum(end, near), scale, DIM, REST, WIDTH, PACKED, LATENT, PAGE_ROWS, SCALES,
        ROWS, PRECISION,
    )  # fmt: skip
    if HAS_ENTRIES:
        total, mass, most = _add_rows(
            total, mass, most, own, own_rest, entries, chosen + token * chosen_width,
            tl.maximum(first - near, 0), end - near, scale, DIM, REST, MORE_WIDTH, PACKED, LATENT,
            MORE_ROWS, SCALES, ROWS, PRECISION,
        )  # fmt: skip
    at = flat[:, None] * DIM + tl.arange(0, DIM)[None, :]
    if SPLIT:
        inside &= mass > 0  # a split without rows writes no partial
        tl.store(out + at, total / mass[:, None], mask=inside[:, None])
        own_lse = tl.where(mass > 0, most * _LOG2_E + tl.log2(mass), float("-inf"))
        tl.store(lse + flat, own_lse, mask=head < num_heads)
    else:
        result = total / mass[:, None]
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
    most_rows = window.slots.shape[1] + (listed.slots.shape[1] if listed is chosen else 0)
    programs = num_tokens * triton.cdiv(num_heads, heads)
    splits = num_splits(programs, most_rows, num_processors(query.device), _LEAST_ROWS)
    target, lse = out, None
    if splits > 1:
        target = query.new_empty((splits, *out.shape), dtype=torch.float32)
        lse = query.new_empty((splits, num_tokens, num_heads), dtype=torch.float32)
    _sparse_attention_kernel[(num_tokens, triton.cdiv(num_heads, heads), splits)](
        query, target, lse, num_tokens, splits, raw.cache,
        window.slots, window.counts, window.slots.shape[1],
        more.cache, listed.slots, listed.counts, listed.slots.shape[1], sinks, scale, num_heads,
        DIM=dim, REST=rest, WIDTH=raw.cache.shape[-1], MORE_WIDTH=more.cache.shape[-1],
        PACKED=raw.fp8 is not None, LATENT=latent, PAGE_ROWS=raw.page_rows,
        MORE_ROWS=more.page_rows, SCALES=scale_bytes(latent),
        HEADS=heads, ROWS=16 if wide else 32, HAS_ENTRIES=entries is not None,
        PRECISION="tf32x3" if wide else "tf32", SPLIT=splits > 1, LEAST_ROWS=_LEAST_ROWS,
        num_warps=8, num_stages=1 if wide else 2,
    )  # fmt: skip
    if lse is not None:
        sum_splits(target, lse, None, out, num_tokens)
    return out


hash_functions(globals())
