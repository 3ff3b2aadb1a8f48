"""Begins and ends a step inside a graph: as `gather_batch`, with the number of rows on the device.

The host bakes N* and M*; which of the N* rows are real stands in `batch.idx_mapping` (-1 = padded,
behind all others) and in the series beside it. No request is in the middle of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device import use_triton
from .gather_batch import BatchTensors, RequestTensors, SampledTokens
from .step_sizes import StepSizes


def prepare_padded_inputs(
    requests: RequestTensors,
    batch: BatchTensors,
    num_reqs: int,  # N*
    num_tokens: int,  # M*
    num_logits: int,  # L*
) -> None:
    """As `prepare_inputs`. Padded logits rows judge no draft of slot 0; a padded request that has
    tokens (of a capture) gets their number as its length, ids and drafts of none."""
    if use_triton(batch.input_ids):
        from .triton.gather_batch import prepare_inputs

        sizes = StepSizes(num_reqs, num_tokens, num_logits, num_reqs, num_tokens)
        prepare_inputs(requests, batch, sizes)
    else:
        prepare_padded_inputs_reference(requests, batch, num_reqs, num_tokens, num_logits)


def prepare_padded_inputs_reference(
    requests: RequestTensors, batch: BatchTensors, num_reqs: int, num_tokens: int, num_logits: int
) -> None:
    """The plain version of `prepare_padded_inputs`."""
    live, slots = slots_of(batch.idx_mapping, num_reqs)
    starts, ends = batch.query_start_loc[:num_reqs], batch.query_start_loc[1 : num_reqs + 1]
    computed = torch.where(live, requests.num_computed_tokens[slots], 0)  # [N*]
    seq_lens = computed + (ends - starts)
    batch.seq_lens[:num_reqs] = seq_lens
    batch.seq_lens[num_reqs:] = 0

    token_rows, rows, real = rows_of(ends, num_tokens)  # [M*] token row -> batch row
    positions = torch.where(real, (computed - starts)[rows] + token_rows, 0)
    last = requests.all_token_ids.shape[1] - 1
    ids = requests.all_token_ids[slots[rows], positions.clamp(max=last)]
    ids = torch.where(real & live[rows], ids, 0)
    batch.positions[:num_tokens] = positions

    cu_ends = batch.cu_num_logits[1 : num_reqs + 1]  # [N*]
    num_logits_of = cu_ends - batch.cu_num_logits[:num_reqs]
    logits_rows, rows, real = rows_of(cu_ends, num_logits)  # [L*] logits row -> batch row
    local = torch.where(real, logits_rows - batch.cu_num_logits[rows], 0)
    indices = torch.where(real, (ends - num_logits_of)[rows] + local, 0).long()
    batch.logits_indices[:num_logits] = indices
    batch.expanded_idx_mapping[:num_logits] = torch.where(real, slots[rows], 0).int()
    batch.expanded_local_pos[:num_logits] = local
    batch.logits_positions[:num_logits] = torch.where(real, positions[indices], 0)

    num_drafts = requests.draft_tokens.shape[1]
    steps = torch.arange(num_drafts + 1, device=slots.device)  # [K + 1]
    drafts = torch.nn.functional.pad(requests.draft_tokens[slots], (0, 1), value=-1)
    scheduled = live[:, None] & (steps < (num_logits_of - 1)[:, None])
    drafts = torch.where(scheduled, drafts, -1)  # [N*, K + 1]
    batch.num_draft_tokens[:num_reqs] = (drafts >= 0).sum(1, dtype=torch.int32)
    batch.num_draft_tokens[num_reqs:] = 0
    batch.draft_ids[:num_logits] = torch.where(real, drafts[rows, local], -1)

    # Ids of a decode: the newest token, then its drafts.
    decodes = live & (seq_lens > requests.prefill_len[slots])
    _, rows, real = rows_of(ends, num_tokens)
    local = token_rows - (ends - num_logits_of)[rows]
    drafted = drafts[rows, (local - 1).clamp(min=0, max=num_drafts)].clamp(min=0)
    newest = requests.last_sampled_tokens[slots][rows]
    own = torch.where(local == 0, newest, drafted).int()
    batch.input_ids[:num_tokens] = torch.where(real & decodes[rows] & (local >= 0), own, ids)


def gather_padded_tables(
    block_tables: Sequence[Tensor],  # per group [R, max_blocks_g] int32, rows are slots
    idx_mapping: Tensor,  # [>= N*] int32
    out: Sequence[Tensor],  # per group [max N*, max_blocks_g] int32, rows are batch rows
    num_reqs: int,  # N*
) -> None:
    """As `gather_block_tables`."""
    if use_triton(idx_mapping):
        from .triton.gather_batch import gather_block_tables

        gather_block_tables(block_tables, idx_mapping, out, num_reqs, num_reqs)
        return
    live, slots = slots_of(idx_mapping, num_reqs)
    for table, rows in zip(block_tables, out, strict=True):
        rows[:num_reqs] = torch.where(live[:, None], table[slots], 0)


def map_padded_slots(
    block_tables: Sequence[Tensor],  # per group [>= N*, max_blocks_g] int32, rows are batch rows
    block_sizes: Sequence[int],  # per group
    query_start_loc: Tensor,  # [>= N* + 1] int32
    positions: Tensor,  # [>= M*] int64
    out: Tensor,  # [G, max M*] int64
    num_reqs: int,  # N*
    num_tokens: int,  # M*
) -> None:
    """As `compute_slot_mappings`."""
    if use_triton(positions):
        from .triton.gather_batch import compute_slot_mappings

        args = (block_tables, block_sizes, query_start_loc, positions, out)
        compute_slot_mappings(*args, num_reqs, num_tokens, num_tokens)
        return
    _, rows, real = rows_of(query_start_loc[1 : num_reqs + 1], num_tokens)
    positions = positions[:num_tokens]
    for group, (table, size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        column, width = positions // size, table.shape[1]
        blocks = table[rows, column.clamp(max=width - 1)].long()
        writes = real & (blocks > 0) & (column < width)
        out[group, :num_tokens] = torch.where(writes, blocks * size + positions % size, -1)


def commit_step(
    requests: RequestTensors,
    batch: BatchTensors,
    sampled: SampledTokens,  # of N* rows
    packed: Tensor,  # [>= N*, K + 4] int64
    counts: Tensor,  # [2, >= N*] int32
) -> None:
    """`post_update` without output counts, and the step's results where a copy and a drafter find
    them: `packed` rows are token ids, num_sampled, num_draft_tokens, has_nan; `counts` holds
    num_sampled and num_rejected."""
    if use_triton(packed):
        from .triton.padded_step import commit_step as commit_step_triton

        commit_step_triton(requests, batch, sampled, packed, counts)
    else:
        commit_step_reference(requests, batch, sampled, packed, counts)


def commit_step_reference(
    requests: RequestTensors,
    batch: BatchTensors,
    sampled: SampledTokens,
    packed: Tensor,
    counts: Tensor,
) -> None:
    """The plain version of `commit_step`."""
    token_ids, num_sampled = sampled.sampled_token_ids, sampled.num_sampled
    num_reqs, width = token_ids.shape
    packed[:num_reqs, :width] = token_ids
    columns = (num_sampled, batch.num_draft_tokens[:num_reqs], sampled.has_nan)
    for column, value in enumerate(columns, width):
        packed[:num_reqs, column] = value.long()
    counts[0, :num_reqs] = num_sampled
    counts[1, :num_reqs] = sampled.num_rejected

    # Every slot looks for its batch row: the sizes are then those of the table.
    live, slots = slots_of(batch.idx_mapping, num_reqs)
    max_reqs, max_len = requests.all_token_ids.shape
    at = torch.where(live, slots, max_reqs)
    rows = torch.full((max_reqs + 1,), -1, device=slots.device)
    rows = rows.scatter(0, at, torch.arange(num_reqs, device=slots.device))[:max_reqs]  # [R]
    present, rows = rows >= 0, rows.clamp(min=0)
    count = torch.where(present, num_sampled[rows], 0)
    starts = batch.query_start_loc[: num_reqs + 1]
    grown = starts[1:] - starts[:-1] - sampled.num_rejected
    requests.num_computed_tokens += torch.where(present, grown[rows], 0).int()
    tokens = token_ids[rows]  # [R, K + 1]
    offsets = torch.arange(max_len, device=slots.device) - requests.total_len[:, None]
    emitted = (offsets >= 0) & (offsets < count[:, None])
    written = tokens.gather(1, offsets.clamp(min=0, max=width - 1).long()).int()
    requests.all_token_ids.copy_(torch.where(emitted, written, requests.all_token_ids))
    requests.total_len.copy_((requests.total_len + count).clamp(max=max_len))
    newest = tokens.gather(1, (count.long() - 1).clamp(min=0)[:, None])[:, 0]
    requests.last_sampled_tokens.copy_(torch.where(count > 0, newest, requests.last_sampled_tokens))


def slots_of(idx_mapping: Tensor, num_reqs: int) -> tuple[Tensor, Tensor]:
    """(which rows are real [N*] bool, their slots [N*] int64, 0 for the others)."""
    slots = idx_mapping[:num_reqs]
    return slots >= 0, slots.clamp(min=0).long()


def rows_of(ends: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(0 .. count - 1, the request of each, whether it has one); ends: [N*] int32."""
    each = torch.arange(count, device=ends.device, dtype=torch.int32)
    rows = torch.searchsorted(ends, each, right=True)
    return each, rows.clamp(max=ends.shape[0] - 1), each < ends[-1]
