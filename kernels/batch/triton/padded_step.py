"""Triton version of `kernels.batch.padded_step.commit_step`, with one program per batch row."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs


@triton.jit(
    do_not_specialize=["counts_stride"],
    do_not_specialize_on_alignment=[
        "query_start_loc",
        "num_sampled",
        "num_rejected",
        "total_len",
        "num_computed_tokens",
    ],
)
def _commit_kernel(
    idx_mapping,
    query_start_loc,
    sampled_token_ids,  # [N*, WIDTH] int64
    num_sampled,
    num_rejected,
    num_draft_tokens,
    is_bad,
    all_token_ids,
    total_len,
    num_computed_tokens,
    last_sampled_tokens,
    packed,  # [>= N*, WIDTH + 3] int64
    counts,  # [2, max N*] int32
    max_model_len,
    counts_stride,
    WIDTH: tl.constexpr,  # K + 1
    BLOCK: tl.constexpr,  # >= K + 1
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_sampled + row)
    rejected = tl.load(num_rejected + row)
    offset = tl.arange(0, BLOCK)
    tokens = tl.load(sampled_token_ids + row * WIDTH + offset, mask=offset < WIDTH, other=-1)
    out = packed + row * (WIDTH + 3)
    tl.store(out + offset, tokens, mask=offset < WIDTH)
    tl.store(out + WIDTH, count.to(tl.int64))
    tl.store(out + WIDTH + 1, tl.load(num_draft_tokens + row).to(tl.int64))
    tl.store(out + WIDTH + 2, tl.load(is_bad + row).to(tl.int64))
    tl.store(counts + row, count)
    tl.store(counts + counts_stride + row, rejected)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    if slot >= 0:
        query_len = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc + row)
        computed = tl.load(num_computed_tokens + slot)
        tl.store(num_computed_tokens + slot, computed + query_len - rejected)
        total = tl.load(total_len + slot)
        target = all_token_ids + slot * max_model_len + total + offset
        known = (offset < count) & (total + offset < max_model_len)
        tl.store(target, tokens.to(tl.int32), mask=known)
        tl.store(total_len + slot, tl.minimum(total + count, max_model_len))
        if count > 0:
            newest = tl.load(sampled_token_ids + row * WIDTH + count - 1)
            tl.store(last_sampled_tokens + slot, newest)


def commit_step(requests: Any, batch: Any, sampled: Any, packed: Tensor, counts: Tensor) -> None:
    """See `kernels.batch.padded_step.commit_step`."""
    token_ids = sampled.sampled_token_ids
    rows, width = token_ids.shape
    assert token_ids.is_contiguous() and packed.stride(0) == width + 3
    _commit_kernel[(rows,)](
        batch.idx_mapping,
        batch.query_start_loc,
        token_ids,
        sampled.num_sampled,
        sampled.num_rejected,
        batch.num_draft_tokens,
        sampled.has_nan,
        requests.all_token_ids,
        requests.total_len,
        requests.num_computed_tokens,
        requests.last_sampled_tokens,
        packed,
        counts,
        requests.all_token_ids.stride(0),
        counts.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
        **pdl_options(packed),
    )
