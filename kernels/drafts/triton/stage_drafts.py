"""Triton versions of `kernels.drafts.stage_drafts`, with one program per row of the buffers."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs

_BLOCK = 256


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "max_reqs"],
    do_not_specialize_on_alignment=[
        "query_start_loc",
        "num_sampled",
        "num_rejected",
        "temperatures",
        "seeds",
    ],
)
def _stage_kernel(
    input_ids,
    positions,
    query_start_loc,
    idx_mapping,
    target_lens,
    num_sampled,
    num_rejected,
    last_sampled_tokens,
    next_prefill_tokens,
    temperatures,  # by slot
    seeds,  # by slot
    max_drafts,  # by slot
    out_ids,
    out_positions,
    last_token_indices,
    out_idx_mapping,
    out_starts,
    decode_positions,
    seq_lens,
    noise_positions,
    temperature,
    seed,
    allowed,
    step,
    num_reqs,
    num_tokens,
    max_reqs,
    max_position,
    num_drafts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    num_live = tl.full([], 0, tl.int32)
    for at in range(0, num_reqs, BLOCK):
        slots = tl.load(idx_mapping + at + lane, mask=at + lane < num_reqs, other=-1)
        num_live += tl.sum((slots >= 0).to(tl.int32), 0)
    tl.store(out_starts + row, tl.minimum(row, num_live))
    if row == max_reqs:  # the tail program
        for at in range(tl.load(query_start_loc + num_reqs), num_tokens, BLOCK):
            tl.store(out_ids + at + lane, 0, mask=at + lane < num_tokens)
            tl.store(out_positions + at + lane, 0, mask=at + lane < num_tokens)
        return
    slot = tl.load(idx_mapping + row, mask=row < num_reqs, other=-1).to(tl.int64)
    live = slot >= 0
    tl.store(out_idx_mapping + row, slot.to(tl.int32))
    start = tl.load(query_start_loc + row, mask=live, other=0)
    end = tl.load(query_start_loc + row + 1, mask=live, other=0)
    rejected = tl.load(num_rejected + row, mask=live, other=0)
    sampled = tl.load(num_sampled + row, mask=live, other=0)
    last = tl.maximum(end - rejected - 1, 0)
    position = tl.load(positions + last, mask=live, other=0)
    length = tl.load(target_lens + row, mask=live, other=0) - rejected
    tl.store(last_token_indices + row, last.to(tl.int64))
    tl.store(decode_positions + row, position)
    tl.store(seq_lens + row, length)
    tl.store(noise_positions + row, position + 1)
    tl.store(step + row, tl.full([], 0, tl.int64))
    tl.store(temperature + row, tl.load(temperatures + slot, mask=live, other=0.0))
    tl.store(seed + row, tl.load(seeds + slot, mask=live, other=0))
    cap = tl.load(max_drafts + slot, mask=live & (sampled > 0), other=0)
    cap = tl.minimum(tl.minimum(cap, num_drafts), (max_position - position).to(tl.int32))
    tl.store(allowed + row, tl.maximum(cap, 0))
    newest = tl.load(last_sampled_tokens + slot, mask=live, other=0)
    prompt = tl.load(next_prefill_tokens + slot, mask=live, other=0)
    following = tl.where(sampled > 0, newest, prompt).to(tl.int32)
    for at in range(start, end, BLOCK):
        token = at + lane
        shifted = tl.load(input_ids + token + 1, mask=token < last, other=0)
        tl.store(out_ids + token, tl.where(token == last, following, shifted), mask=token < end)
        where = tl.load(positions + token, mask=token < end, other=0)
        tl.store(out_positions + token, tl.minimum(where, max_position - 1), mask=token < end)


def stage_draft_rows(
    of: Any, requests: Any, out: Any, num_reqs: int, num_tokens: int, max_position: int
) -> None:
    """See `kernels.drafts.stage_drafts.stage_draft_rows`."""
    max_reqs = out.idx_mapping.shape[0]
    _stage_kernel[(max_reqs + 1,)](
        of.input_ids,
        of.positions,
        of.query_start_loc,
        of.idx_mapping,
        of.seq_lens,
        of.num_sampled,
        of.num_rejected,
        requests.last_sampled_tokens,
        requests.next_prefill_tokens,
        requests.temperature,
        requests.seed,
        requests.max_drafts,
        out.input_ids,
        out.positions,
        out.last_token_indices,
        out.idx_mapping,
        out.query_start_loc,
        out.decode_positions,
        out.seq_lens,
        out.noise_positions,
        out.temperature,
        out.seed,
        out.allowed,
        out.step,
        num_reqs,
        num_tokens,
        max_reqs,
        max_position,
        out.draft_tokens.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_options(out.input_ids),
    )


@triton.jit(do_not_specialize=["num_made"])
def _store_kernel(
    draft_tokens,  # [R, K] int64 by batch row
    idx_mapping,
    allowed,
    most_drafts,
    out,  # [R, K] int64 by slot
    num_made,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # >= K
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    made = column < num_made
    drafts = tl.load(draft_tokens + row * K + column, mask=made, other=-1)
    drafts = tl.where(column < tl.load(allowed + row), drafts, -1)
    tl.store(draft_tokens + row * K + column, drafts, mask=made)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    kept = tl.where(column < tl.load(most_drafts + row), drafts, -1)
    tl.store(out + slot * K + column, kept, mask=(column < K) & (slot >= 0))


def store_draft_rows(
    of: Any, most_drafts: Tensor, out: Tensor, num_reqs: int, num_made: int
) -> None:
    """See `kernels.drafts.stage_drafts.store_draft_rows`."""
    num_drafts = out.shape[1]
    assert of.draft_tokens.stride(0) == out.stride(0) == num_drafts
    _store_kernel[(num_reqs,)](
        of.draft_tokens,
        of.idx_mapping,
        of.allowed,
        most_drafts,
        out,
        num_made,
        K=num_drafts,
        BLOCK=triton.next_power_of_2(num_drafts),
        num_warps=1,
        **pdl_options(out),
    )
