"""Triton version of `kernels.prepare_draft`: one program a request row, one more for the tail."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _shift_draft_ids_kernel(
    input_ids,
    query_start_loc,
    idx_mapping,
    num_sampled,
    num_rejected,
    last_sampled_tokens,
    next_prefill_tokens,
    out_ids,
    out_last_token_indices,
    num_reqs,
    num_tokens,
    num_reqs_padded,
    num_tokens_padded,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if row == num_reqs:  # the tail program
        for at in range(num_reqs, num_reqs_padded, BLOCK):
            tl.store(out_last_token_indices + at + lane, 0, mask=at + lane < num_reqs_padded)
        for at in range(num_tokens, num_tokens_padded, BLOCK):
            tl.store(out_ids + at + lane, 0, mask=at + lane < num_tokens_padded)
        return
    slot = tl.load(idx_mapping + row).to(tl.int64)
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    last = end - tl.load(num_rejected + row) - 1
    tl.store(out_last_token_indices + row, last.to(tl.int64))
    if tl.load(num_sampled + row) > 0:
        following = tl.load(last_sampled_tokens + slot)
    else:
        following = tl.load(next_prefill_tokens + slot)
    for at in range(start, end, BLOCK):
        token = at + lane
        shifted = tl.load(input_ids + token + 1, mask=token < last, other=0)
        ids = tl.where(token == last, following.to(tl.int32), shifted)
        tl.store(out_ids + token, ids, mask=token < end)


def shift_draft_ids(
    input_ids: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled_tokens: Tensor,
    next_prefill_tokens: Tensor,
    out_ids: Tensor,
    out_last_token_indices: Tensor,
    num_tokens: int,
    num_reqs_padded: int,
    num_tokens_padded: int,
) -> None:
    """See `kernels.prepare_draft.shift_draft_ids`."""
    num_reqs = num_sampled.shape[0]
    _shift_draft_ids_kernel[(num_reqs + 1,)](
        input_ids,
        query_start_loc,
        idx_mapping,
        num_sampled,
        num_rejected,
        last_sampled_tokens,
        next_prefill_tokens,
        out_ids,
        out_last_token_indices,
        num_reqs,
        num_tokens,
        num_reqs_padded,
        num_tokens_padded,
        BLOCK=_BLOCK,
    )
