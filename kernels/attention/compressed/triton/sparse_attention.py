"""Triton version of `kernels.attention.compressed.sparse_attention`: some heads of a token each."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions
from ..pages import Pages, SlotList


@triton.jit
def _add_rows(
    total,  # [HEADS, DIM]
    mass,  # [HEADS]
    most,  # [HEADS]
    query,  # [HEADS, DIM]
    cache,  # [slots, DIM]
    slots,  # of this token
    count,
    scale,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    channel = tl.arange(0, DIM)
    for start in range(0, count, ROWS):
        place = start + tl.arange(0, ROWS)
        inside = place < count
        slot = tl.load(slots + place, mask=inside, other=0).to(tl.int64)
        rows = tl.load(
            cache + slot[:, None] * DIM + channel[None, :], mask=inside[:, None], other=0
        )
        score = tl.dot(query, tl.trans(rows), input_precision=PRECISION) * scale
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
    query,  # [M, heads, DIM], contiguous
    out,  # [M, heads, DIM], contiguous
    raw,  # [slots, DIM]
    window,  # [M, window_width] int32
    window_counts,  # [M] int32
    window_width,
    entries,  # [slots, DIM]
    chosen,  # [M, chosen_width] int32
    chosen_counts,  # [M] int32
    chosen_width,
    sinks,  # [heads] float32
    scale,
    num_heads,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < num_heads
    at = (token * num_heads + head[:, None]) * DIM + tl.arange(0, DIM)[None, :]
    own = tl.load(query + at, mask=inside[:, None], other=0.0)
    most = tl.load(sinks + head, mask=inside, other=0.0)  # the sink is the first logit
    mass = tl.full([HEADS], 1.0, tl.float32)
    total = tl.zeros([HEADS, DIM], tl.float32)
    total, mass, most = _add_rows(
        total, mass, most, own, raw, window + token * window_width,
        tl.load(window_counts + token), scale, DIM, ROWS, PRECISION,
    )  # fmt: skip
    if HAS_ENTRIES:
        total, mass, most = _add_rows(
            total, mass, most, own, entries, chosen + token * chosen_width,
            tl.load(chosen_counts + token), scale, DIM, ROWS, PRECISION,
        )  # fmt: skip
    result = total / mass[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside[:, None])


def sparse_attention(
    query: Tensor,
    raw: Pages,
    window: SlotList,
    entries: Pages | None,
    chosen: SlotList | None,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    """See `kernels.attention.compressed.sparse_attention.sparse_attention`."""
    num_tokens, num_heads, dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    assert query.is_contiguous() and raw.cache.is_contiguous() and dim & (dim - 1) == 0
    more, listed = (raw, window) if entries is None or chosen is None else (entries, chosen)
    heads = min(32, max(16, triton.next_power_of_2(num_heads)))
    wide = query.dtype == torch.float32
    _sparse_attention_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        query, out, raw.cache, window.slots, window.counts, window.slots.shape[1],
        more.cache, listed.slots, listed.counts, listed.slots.shape[1], sinks, scale, num_heads,
        DIM=dim, HEADS=heads, ROWS=16 if wide else 32, HAS_ENTRIES=entries is not None,
        PRECISION="tf32x3" if wide else "tf32", num_warps=8, num_stages=1 if wide else 2,
    )  # fmt: skip
    return out


hash_functions(globals())
