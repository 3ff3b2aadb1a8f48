"""Gathers a step's batch from the request table's slots, and writes the step's results back.

N requests are padded to N*, M tokens to M*, and there are L logits rows; the host knows all five.
Each function writes into preallocated buffers and fills their padding in the same pass. Nothing
here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..device import use_triton
from ..operation import operation
from .gather_batch_cpu import post_update_cpu, prepare_inputs_cpu
from .step_sizes import StepSizes


class RequestTensors(Protocol):
    """The columns of the request table that these kernels use, for R slots and K drafts."""

    all_token_ids: Tensor  # [R, max_model_len] int32
    prefill_len: Tensor  # [R] int32
    total_len: Tensor  # [R] int32
    num_computed_tokens: Tensor  # [R] int32
    last_sampled_tokens: Tensor  # [R] int64
    next_prefill_tokens: Tensor  # [R] int64
    draft_tokens: Tensor  # [R, K] int64, -1 = none


class BatchTensors(Protocol):
    """The buffers of a step, allocated once at the largest padded sizes."""

    # Filled by the host; the padding, to the end of each, is -1, M and L.
    idx_mapping: Tensor  # [max N*] int32, batch row -> slot
    query_start_loc: Tensor  # [max N* + 1] int32
    cu_num_logits: Tensor  # [max N* + 1] int32
    # Filled by `prepare_inputs`.
    seq_lens: Tensor  # [max N*] int32
    num_draft_tokens: Tensor  # [max N*] int32, drafts that are not -1
    input_ids: Tensor  # [max M*] int32
    positions: Tensor  # [max M*] int64
    logits_indices: Tensor  # [max L] int64, logits row -> token row
    expanded_idx_mapping: Tensor  # [max L] int32, logits row -> slot
    expanded_local_pos: Tensor  # [max L] int32, 0 .. n_draft within the request
    draft_ids: Tensor  # [max L] int64, the draft that the row verifies; -1 = none
    logits_positions: Tensor  # [max L] int64, sequence position of that row


class BatchRows(Protocol):
    """Which slot and which token rows belong to each batch row."""

    @property
    def idx_mapping(self) -> Tensor: ...  # [>= N] int32, batch row -> slot, negative = none
    @property
    def query_start_loc(self) -> Tensor: ...  # [>= N + 1] int32


class SampledTokens(Protocol):
    """What a step sampled, by batch row."""

    @property
    def sampled_token_ids(self) -> Tensor: ...  # [N, K + 1] int64, -1 beyond num_sampled
    @property
    def num_sampled(self) -> Tensor: ...  # [N] int32
    @property
    def num_rejected(self) -> Tensor: ...  # [N] int32
    @property
    def has_nan(self) -> Tensor: ...  # [N] bool, the request's sampling failed


def prepare_inputs(requests: RequestTensors, batch: BatchTensors, sizes: StepSizes) -> None:
    """Fill `batch` from the slots in `batch.idx_mapping`.

    It also stores the prompt token that follows each unfinished prefill chunk in
    `requests.next_prefill_tokens`. Padded requests get seq_len 0, to the end of the buffer; padded
    tokens get id and position 0. A draft of -1 becomes input id 0 and stays -1 in `draft_ids`.
    """
    if use_triton(batch.input_ids):
        from .triton.gather_batch import prepare_inputs as prepare_inputs_triton

        prepare_inputs_triton(requests, batch, sizes)
    elif batch.input_ids.is_cpu:
        prepare_inputs_cpu(requests, batch, sizes)
    else:
        prepare_inputs_reference(requests, batch, sizes)


def prepare_inputs_reference(
    requests: RequestTensors, batch: BatchTensors, sizes: StepSizes
) -> None:
    """The plain version of `prepare_inputs`; it defines the correct result."""
    num_reqs, num_tokens, num_logits, _, num_tokens_padded = sizes
    slots = batch.idx_mapping[:num_reqs]  # [N] batch row -> slot
    starts = batch.query_start_loc[:num_reqs]  # [N]
    ends = batch.query_start_loc[1 : num_reqs + 1]  # [N]
    computed = requests.num_computed_tokens[slots]  # [N]
    prefill_len = requests.prefill_len[slots]  # [N]
    seq_lens = computed + (ends - starts)
    batch.seq_lens[:num_reqs] = seq_lens
    batch.seq_lens[num_reqs:] = 0

    token_rows = torch.arange(num_tokens, device=slots.device, dtype=torch.int32)  # [M]
    rows = torch.searchsorted(ends, token_rows, right=True)  # [M] token row -> batch row
    positions = (computed - starts)[rows] + token_rows
    width = requests.all_token_ids.shape[1]
    ids = requests.all_token_ids[slots[rows], positions.clamp(max=width - 1)]
    batch.positions[:num_tokens] = positions
    batch.positions[num_tokens:num_tokens_padded] = 0

    after_chunk = requests.all_token_ids[slots, seq_lens.clamp(max=width - 1)].long()
    stored = requests.next_prefill_tokens[slots]
    in_prefill = seq_lens < prefill_len
    requests.next_prefill_tokens[slots] = torch.where(in_prefill, after_chunk, stored)

    # Rows that produce logits: the last n_draft + 1 of each query.
    cu_ends = batch.cu_num_logits[1 : num_reqs + 1]  # [N]
    num_logits_of = cu_ends - batch.cu_num_logits[:num_reqs]  # [N]
    logits_rows = torch.arange(num_logits, device=slots.device, dtype=torch.int32)  # [L]
    rows = torch.searchsorted(cu_ends, logits_rows, right=True)  # [L] logits row -> batch row
    local = logits_rows - batch.cu_num_logits[rows]  # [L]
    indices = (ends - num_logits_of)[rows].long() + local  # [L] logits row -> token row
    row_slots = slots[rows]  # [L] logits row -> slot

    num_drafts = requests.draft_tokens.shape[1]
    if num_drafts:
        steps = torch.arange(num_drafts, device=slots.device)  # [K]
        scheduled = steps < (num_logits_of - 1)[:, None]  # [N, K]
        drafts = torch.where(scheduled, requests.draft_tokens[slots], -1)  # [N, K]
        batch.num_draft_tokens[:num_reqs] = (drafts >= 0).sum(1, dtype=torch.int32)
        drafts = torch.cat([drafts, drafts.new_full((num_reqs, 1), -1)], 1)  # [N, K + 1]
        judged = drafts[rows, local]  # [L]
        previous = drafts[rows, (local - 1)]  # [L] input id of a row past the first
    else:
        batch.num_draft_tokens[:num_reqs] = 0
        judged = previous = torch.full((num_logits,), -1, device=slots.device)
    batch.num_draft_tokens[num_reqs:] = 0

    newest = requests.last_sampled_tokens[row_slots]  # [L]
    decode_ids = torch.where(local == 0, newest, previous.clamp(min=0)).int()
    is_decode = (seq_lens > prefill_len)[rows]  # [L]
    ids[indices] = torch.where(is_decode, decode_ids, ids[indices])
    batch.input_ids[:num_tokens] = ids
    batch.input_ids[num_tokens:num_tokens_padded] = 0

    batch.logits_indices[:num_logits] = indices
    batch.expanded_idx_mapping[:num_logits] = row_slots
    batch.expanded_local_pos[:num_logits] = local
    batch.draft_ids[:num_logits] = judged
    batch.logits_positions[:num_logits] = positions[indices]


def gather_block_tables_reference(
    block_tables: Sequence[Tensor],  # per group [R, max_blocks_g] int32, rows are slots
    idx_mapping: Tensor,  # [>= N*] int32, batch row -> slot, -1 for padded rows
    out: Sequence[Tensor],  # per group [max N*, max_blocks_g] int32, rows are batch rows
    num_reqs: int,
    num_reqs_padded: int,
) -> None:
    """Copy each request's block table to its batch row; padded rows get the null block 0."""
    slots = idx_mapping[:num_reqs]
    for table, rows in zip(block_tables, out, strict=True):
        torch.index_select(table, 0, slots, out=rows[:num_reqs])
        rows[num_reqs:num_reqs_padded] = 0


gather_block_tables = operation(
    gather_block_tables_reference, "idx_mapping", ".triton.gather_batch"
)


def compute_slot_mappings_reference(
    block_tables: Sequence[Tensor],  # per group [>= N*, max_blocks_g] int32, rows are batch rows
    block_sizes: Sequence[int],  # per group
    query_start_loc: Tensor,  # [>= N* + 1] int32
    positions: Tensor,  # [>= M*] int64
    out: Tensor,  # [G, max M*] int64
    num_reqs: int,
    num_tokens: int,
    num_tokens_padded: int,
) -> None:
    """Compute the KV slot of every token: block * block_size + position mod block_size.

    The slot is -1, "write nothing", for padded tokens, for positions beyond the table and for
    positions whose table entry is the null block 0.
    """
    token_rows = torch.arange(num_tokens, device=positions.device, dtype=torch.int32)
    ends = query_start_loc[1 : num_reqs + 1]
    rows = torch.searchsorted(ends, token_rows, right=True)  # [M] token row -> batch row
    positions = positions[:num_tokens]
    for group, (table, size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        column = positions // size  # [M]
        width = table.shape[1]
        blocks = table[rows, column.clamp(max=width - 1)].long()
        slots = blocks * size + positions % size
        writes = (blocks > 0) & (column < width)
        out[group, :num_tokens] = torch.where(writes, slots, -1)
        out[group, num_tokens:num_tokens_padded] = -1


compute_slot_mappings = operation(
    compute_slot_mappings_reference, "positions", ".triton.gather_batch"
)


def post_update(
    requests: RequestTensors,
    batch: BatchRows,  # rows without a slot are skipped
    sampled: SampledTokens,
    output_bin_counts: Tensor | None,  # [R, V] int32, or None if no request counts its output
) -> None:
    """Write a step's result into the request table: tokens, lengths, newest token, output counts.

    `num_computed_tokens` grows by query length - num_rejected, since the next step overwrites the
    KV of rejected drafts. Tokens beyond the table's width are dropped, and `total_len` stays within
    that width.
    """
    if use_triton(batch.idx_mapping):
        from .triton.gather_batch import post_update as post_update_triton

        post_update_triton(requests, batch, sampled, output_bin_counts)
    elif batch.idx_mapping.is_cpu:
        post_update_cpu(requests, batch, sampled, output_bin_counts)
    else:
        post_update_reference(requests, batch, sampled, output_bin_counts)


def post_update_reference(
    requests: RequestTensors,
    batch: BatchRows,
    sampled: SampledTokens,
    output_bin_counts: Tensor | None,
) -> None:
    """The plain version of `post_update`."""
    num_reqs, columns = sampled.sampled_token_ids.shape
    live = (batch.idx_mapping[:num_reqs] >= 0).nonzero().flatten()  # rows with a slot
    slots = batch.idx_mapping[:num_reqs][live].long()
    query_lens = batch.query_start_loc[1 : num_reqs + 1] - batch.query_start_loc[:num_reqs]
    num_sampled = sampled.num_sampled[live]
    requests.num_computed_tokens[slots] += query_lens[live] - sampled.num_rejected[live]

    width = requests.all_token_ids.shape[1]
    total_len = requests.total_len[slots]
    offsets = torch.arange(columns, device=slots.device)
    emitted = offsets < num_sampled[:, None]  # [live, K + 1]
    where = total_len[:, None] + offsets
    rows, column = (emitted & (where < width)).nonzero(as_tuple=True)
    tokens = sampled.sampled_token_ids[live]
    requests.all_token_ids[slots[rows], where[rows, column]] = tokens[rows, column].int()
    requests.total_len[slots] = (total_len + num_sampled).clamp(max=width)

    newest = tokens.gather(1, (num_sampled.long() - 1).clamp(min=0)[:, None])[:, 0]
    stored = requests.last_sampled_tokens[slots]
    requests.last_sampled_tokens[slots] = torch.where(num_sampled > 0, newest, stored)
    if output_bin_counts is not None:
        rows, column = emitted.nonzero(as_tuple=True)
        one = output_bin_counts.new_ones(()).expand(rows.shape[0])
        output_bin_counts.index_put_((slots[rows], tokens[rows, column]), one, accumulate=True)
