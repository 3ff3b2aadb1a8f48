"""Triton version of the scores in `kernels.attention.compressed.select_entries`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions
from ...triton.latent_rows import load_latent
from ..pages import Pages, TokenRows
from .paged import row_offsets


@triton.jit(
    do_not_specialize=["columns", "most"],
    do_not_specialize_on_alignment=["block_table", "positions", "requests", "weights", "out"],
)
def _score_kernel(
    query,  # [M, heads, DIM], contiguous
    weights,  # [M, heads] float32
    keys,  # [slots, WIDTH]
    block_table,  # [N, columns] int32
    columns,
    positions,  # [M] int64
    requests,  # [M] int64
    out,  # [M, most] float32
    most,
    weight_stride,
    num_heads,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    visible = (tl.load(positions + token) + 1) // RATIO
    scores = tl.full([ENTRIES], float("-inf"), tl.float32)
    if tl.program_id(1) * ENTRIES < visible:
        inside = entry < visible
        table = block_table + tl.load(requests + token) * columns
        head, channel = tl.arange(0, HEADS), tl.arange(0, DIM)
        row = keys + row_offsets(table, entry * RATIO, inside, BLOCK_SIZE, RATIO, WIDTH)
        if PACKED:
            rows = load_latent(row, inside, query.dtype.element_ty, DIM, DIM)
        else:
            rows = tl.load(row[:, None] + channel[None, :], mask=inside[:, None], other=0)
        source = query + (token * num_heads + head[:, None]) * DIM + channel[None, :]
        own = tl.load(source, mask=(head < num_heads)[:, None], other=0.0)
        products = tl.dot(rows, tl.trans(own), input_precision=PRECISION)  # [ENTRIES, HEADS]
        share = tl.load(weights + token * weight_stride + head, mask=head < num_heads, other=0.0)
        found = tl.sum(tl.maximum(products, 0.0) * share[None, :], axis=1)
        scores = tl.where(inside, found, float("-inf"))
    tl.store(out + token * most + entry, scores, mask=entry < most)


def score_entries(
    query: Tensor, weights: Tensor, keys: Pages, tokens: TokenRows, most: int
) -> Tensor:
    """See `kernels.attention.compressed.select_entries.score_entries_reference`."""
    num_tokens, num_heads, dim = query.shape
    out = torch.empty(num_tokens, most, dtype=torch.float32, device=query.device)
    if num_tokens == 0:
        return out
    assert query.is_contiguous() and keys.cache.is_contiguous() and weights.stride(1) == 1
    entries = 64
    _score_kernel[(num_tokens, triton.cdiv(most, entries))](
        query, weights, keys.cache, keys.block_table, keys.block_table.stride(0),
        tokens.positions, tokens.requests, out, most, weights.stride(0), num_heads,
        RATIO=keys.entry_tokens, BLOCK_SIZE=keys.block_size, DIM=dim,
        WIDTH=keys.cache.shape[-1], PACKED=keys.fp8 is not None,
        HEADS=max(16, triton.next_power_of_2(num_heads)), ENTRIES=entries,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out


hash_functions(globals())
