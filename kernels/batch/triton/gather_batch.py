"""Triton versions of `kernels.batch.gather_batch`: one program per row and one for the padding."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs
from ..step_sizes import StepSizes

_BLOCK = 1024


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens_padded", "num_logits_padded", "max_reqs"],
    do_not_specialize_on_alignment=[
        "query_start_loc",
        "cu_num_logits",
        "prefill_len",
        "num_computed_tokens",
    ],
)
def _prepare_inputs_kernel(
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    all_token_ids,
    prefill_len,
    num_computed_tokens,
    last_sampled_tokens,
    next_prefill_tokens,
    draft_tokens,
    seq_lens,
    num_draft_tokens,
    input_ids,
    positions,
    logits_indices,
    expanded_idx_mapping,
    expanded_local_pos,
    draft_ids,
    logits_positions,
    width,  # of all_token_ids
    num_reqs,  # rows with a slot, or -1 for padding among them
    max_reqs,  # length of seq_lens
    num_tokens_padded,
    num_logits_padded,
    NUM_DRAFTS: tl.constexpr,  # K
    BLOCK_L: tl.constexpr,  # >= K + 1
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if row == num_reqs:  # the tail program
        for at in range(num_reqs, max_reqs, BLOCK):
            tl.store(seq_lens + at + lane, 0, mask=at + lane < max_reqs)
            tl.store(num_draft_tokens + at + lane, 0, mask=at + lane < max_reqs)
        for at in range(tl.load(query_start_loc + num_reqs), num_tokens_padded, BLOCK):
            inside = at + lane < num_tokens_padded
            tl.store(input_ids + at + lane, 0, mask=inside)
            tl.store(positions + at + lane, 0, mask=inside)
        for at in range(tl.load(cu_num_logits + num_reqs), num_logits_padded, BLOCK):
            inside = at + lane < num_logits_padded
            tl.store(logits_indices + at + lane, 0, mask=inside)
            tl.store(expanded_idx_mapping + at + lane, 0, mask=inside)
            tl.store(expanded_local_pos + at + lane, 0, mask=inside)
            tl.store(draft_ids + at + lane, tl.full([BLOCK], -1, tl.int64), mask=inside)
            tl.store(logits_positions + at + lane, 0, mask=inside)
        return
    slot = tl.load(idx_mapping + row).to(tl.int64)
    live = slot >= 0  # otherwise a padded row of a graph, which has tokens only in a capture
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    first_logit = tl.load(cu_num_logits + row)
    num_logits = tl.load(cu_num_logits + row + 1) - first_logit
    computed = tl.load(num_computed_tokens + slot, mask=live, other=0)
    seq_len = computed + end - start
    prefill = tl.load(prefill_len + slot, mask=live, other=seq_len)
    tl.store(seq_lens + row, seq_len)
    tokens = all_token_ids + slot * width
    if seq_len < prefill:
        following = tl.load(tokens + tl.minimum(seq_len, width - 1))
        tl.store(next_prefill_tokens + slot, following.to(tl.int64))
    newest = tl.load(last_sampled_tokens + slot, mask=live, other=0).to(tl.int32)
    for at in range(start, end, BLOCK):
        token = at + lane
        inside = token < end
        position = computed + token - start
        ids = tl.load(tokens + tl.minimum(position, width - 1), mask=inside & live, other=0)
        if seq_len > prefill:  # decoding: the last rows are the newest token and the drafts
            local = token - (end - num_logits)
            ids = tl.where(local == 0, newest, ids)
            if NUM_DRAFTS > 0:
                drafted = inside & (local > 0)
                draft = tl.load(draft_tokens + slot * NUM_DRAFTS + local - 1, mask=drafted, other=0)
                ids = tl.where(drafted, tl.maximum(draft, 0).to(tl.int32), ids)
        tl.store(input_ids + token, ids, mask=inside)
        tl.store(positions + token, position.to(tl.int64), mask=inside)

    local = tl.arange(0, BLOCK_L)
    inside = local < num_logits
    judged = tl.full([BLOCK_L], -1, tl.int64)
    if NUM_DRAFTS > 0:
        known = live & (local < num_logits - 1)
        judged = tl.load(draft_tokens + slot * NUM_DRAFTS + local, mask=known, other=-1)
    tl.store(num_draft_tokens + row, tl.sum((judged >= 0).to(tl.int32), 0))
    index = end - num_logits + local
    tl.store(logits_indices + first_logit + local, index.to(tl.int64), mask=inside)
    row_slot = tl.maximum(slot, 0).to(tl.int32)
    tl.store(expanded_idx_mapping + first_logit + local, row_slot, mask=inside)
    tl.store(expanded_local_pos + first_logit + local, local, mask=inside)
    tl.store(draft_ids + first_logit + local, judged, mask=inside)
    position = (seq_len - num_logits + local).to(tl.int64)
    tl.store(logits_positions + first_logit + local, position, mask=inside)


def prepare_inputs(requests: Any, batch: Any, sizes: StepSizes) -> None:
    """See `kernels.batch.gather_batch.prepare_inputs`."""
    num_reqs, _, num_logits, _, num_tokens_padded = sizes  # `seq_lens` is cleared to its end
    num_drafts = requests.draft_tokens.shape[1]
    _prepare_inputs_kernel[(num_reqs + 1,)](
        batch.idx_mapping,
        batch.query_start_loc,
        batch.cu_num_logits,
        requests.all_token_ids,
        requests.prefill_len,
        requests.num_computed_tokens,
        requests.last_sampled_tokens,
        requests.next_prefill_tokens,
        requests.draft_tokens if num_drafts else requests.last_sampled_tokens,
        batch.seq_lens,
        batch.num_draft_tokens,
        batch.input_ids,
        batch.positions,
        batch.logits_indices,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        batch.draft_ids,
        batch.logits_positions,
        requests.all_token_ids.stride(0),
        num_reqs,
        batch.seq_lens.shape[0],
        num_tokens_padded,
        num_logits,
        NUM_DRAFTS=num_drafts,
        BLOCK_L=triton.next_power_of_2(num_drafts + 1),
        BLOCK=_BLOCK,
        **pdl_options(batch.input_ids),
    )


@triton.jit(do_not_specialize=["num_reqs"])
def _gather_rows_kernel(
    table,  # [R, width]
    idx_mapping,  # batch row -> slot
    out,  # [max N*, width]
    table_stride,
    out_stride,
    width,
    num_reqs,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    blocks = tl.zeros([BLOCK], tl.int32)
    if row < num_reqs:
        slot = tl.load(idx_mapping + row).to(tl.int64)
        known = inside & (slot >= 0)
        blocks = tl.load(table + slot * table_stride + column, mask=known, other=0)
    tl.store(out + row * out_stride + column, blocks, mask=inside)


def gather_block_tables(
    block_tables: Sequence[Tensor],
    idx_mapping: Tensor,
    out: Sequence[Tensor],
    num_reqs: int,
    num_reqs_padded: int,
) -> None:
    """See `kernels.batch.gather_batch.gather_block_tables`."""
    if num_reqs_padded == 0:
        return
    for table, rows in zip(block_tables, out, strict=True):
        width = table.shape[1]
        _gather_rows_kernel[(num_reqs_padded, triton.cdiv(width, _BLOCK))](
            table,
            idx_mapping,
            rows,
            table.stride(0),
            rows.stride(0),
            width,
            num_reqs,
            BLOCK=_BLOCK,
            **pdl_options(table),
        )


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens_padded"],
    do_not_specialize_on_alignment=["query_start_loc", "out"],
)
def _slot_mapping_kernel(
    table,  # [>= N, width] int32, rows are batch rows
    query_start_loc,
    positions,
    out,  # [max M*] int64
    table_stride,
    width,
    block_size,
    num_reqs,
    num_tokens_padded,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if row == num_reqs:  # the tail program: padded tokens write nothing
        for at in range(tl.load(query_start_loc + num_reqs), num_tokens_padded, BLOCK):
            nothing = tl.full([BLOCK], -1, tl.int64)
            tl.store(out + at + lane, nothing, mask=at + lane < num_tokens_padded)
        return
    end = tl.load(query_start_loc + row + 1)
    for at in range(tl.load(query_start_loc + row), end, BLOCK):
        token = at + lane
        inside = token < end
        position = tl.load(positions + token, mask=inside, other=0)
        column = position // block_size
        known = inside & (column < width)
        block = tl.load(table + row.to(tl.int64) * table_stride + column, mask=known, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(out + token, tl.where(block > 0, slot, -1), mask=inside)


def compute_slot_mappings(
    block_tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    query_start_loc: Tensor,
    positions: Tensor,
    out: Tensor,
    num_reqs: int,
    num_tokens: int,
    num_tokens_padded: int,
) -> None:
    """See `kernels.batch.gather_batch.compute_slot_mappings`."""
    del num_tokens  # the last of `query_start_loc`
    for group, (table, size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        _slot_mapping_kernel[(num_reqs + 1,)](
            table,
            query_start_loc,
            positions,
            out[group],
            table.stride(0),
            table.shape[1],
            size,
            num_reqs,
            num_tokens_padded,
            BLOCK=_BLOCK,
            **pdl_options(table),
        )


@triton.jit(
    do_not_specialize=["vocab_size"],
    do_not_specialize_on_alignment=[
        "query_start_loc",
        "num_sampled",
        "num_rejected",
        "total_len",
        "num_computed_tokens",
    ],
)
def _post_update_kernel(
    idx_mapping,
    query_start_loc,
    sampled_token_ids,  # [N, WIDTH] int64
    num_sampled,
    num_rejected,
    all_token_ids,
    total_len,
    num_computed_tokens,
    last_sampled_tokens,
    output_bin_counts,  # [R, V] int32
    sampled_stride,
    width,  # of all_token_ids
    vocab_size,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,  # >= K + 1
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    if slot >= 0:
        query_len = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc + row)
        computed = tl.load(num_computed_tokens + slot)
        rejected = tl.load(num_rejected + row)
        tl.store(num_computed_tokens + slot, computed + query_len - rejected)
        count = tl.load(num_sampled + row)
        offset = tl.arange(0, BLOCK)
        emitted = offset < count
        sampled = sampled_token_ids + row * sampled_stride
        tokens = tl.load(sampled + offset, mask=emitted, other=0)
        total = tl.load(total_len + slot)
        target = all_token_ids + slot * width + total + offset
        tl.store(target, tokens.to(tl.int32), mask=emitted & (total + offset < width))
        tl.store(total_len + slot, tl.minimum(total + count, width))
        if count > 0:
            tl.store(last_sampled_tokens + slot, tl.load(sampled + count - 1))
        if COUNT:  # atomic, since a row may emit the same token twice
            tl.atomic_add(output_bin_counts + slot * vocab_size + tokens, 1, mask=emitted)


def post_update(requests: Any, batch: Any, sampled: Any, output_bin_counts: Tensor | None) -> None:
    """See `kernels.batch.gather_batch.post_update`."""
    token_ids = sampled.sampled_token_ids
    num_reqs, columns = token_ids.shape
    if num_reqs == 0:
        return
    counts = requests.all_token_ids if output_bin_counts is None else output_bin_counts
    _post_update_kernel[(num_reqs,)](
        batch.idx_mapping,
        batch.query_start_loc,
        token_ids,
        sampled.num_sampled,
        sampled.num_rejected,
        requests.all_token_ids,
        requests.total_len,
        requests.num_computed_tokens,
        requests.last_sampled_tokens,
        counts,
        token_ids.stride(0),
        requests.all_token_ids.stride(0),
        counts.shape[-1],
        COUNT=output_bin_counts is not None,
        BLOCK=triton.next_power_of_2(columns),
    )
