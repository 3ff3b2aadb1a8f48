"""`gather_batch` for graphs: begins and ends a step when only the device knows the number of rows.

A graph bakes N* and M*. Which of the N* rows are real is read on the device: padded rows have slot
-1 in `batch.idx_mapping` and follow all others. No request is in the middle of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device import use_triton
from ..operation import operation
from .gather_batch import BatchTensors, RequestTensors, SampledTokens
from .step_sizes import StepSizes


def prepare_padded_inputs(
    requests: RequestTensors,
    batch: BatchTensors,
    num_reqs: int,  # N*
    num_tokens: int,  # M*
    num_logits: int,  # L*
) -> None:
    """Do what `prepare_inputs` does, with all numbers of rows padded.

    Padded logits rows have slot 0 and verify no draft. During a capture, padded requests have
    tokens: their length is then the number of these tokens, with id 0 and no drafts.
    """
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

    # A decoding request's input ids are its newest token, then its drafts.
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
    """Do what `gather_block_tables` does, with the number of rows padded."""
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
    """Do what `compute_slot_mappings` does, with the numbers of rows and tokens padded."""
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


def commit_step_reference(
    requests: RequestTensors,
    batch: BatchTensors,
    sampled: SampledTokens,  # of N* rows
    packed: Tensor,  # [>= N*, K + 4] int64
    counts: Tensor,  # [2, >= N*] int32
) -> None:
    """Do what `post_update` does, without output counts, and store the step's results.

    A row of `packed`, which is copied to the host, holds the token ids, num_sampled,
    num_draft_tokens and has_nan. `counts`, which the drafter reads, holds num_sampled and
    num_rejected.
    """
    token_ids, num_sampled = sampled.sampled_token_ids, sampled.num_sampled
    num_reqs, width = token_ids.shape
    packed[:num_reqs, :width] = token_ids
    columns = (num_sampled, batch.num_draft_tokens[:num_reqs], sampled.has_nan)
    for column, value in enumerate(columns, width):
        packed[:num_reqs, column] = value.long()
    counts[0, :num_reqs] = num_sampled
    counts[1, :num_reqs] = sampled.num_rejected

    # Look up the batch row of every slot, so that all sizes are those of the table.
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


commit_step = operation(commit_step_reference, "packed", ".triton.padded_step")


def slots_of(idx_mapping: Tensor, num_reqs: int) -> tuple[Tensor, Tensor]:
    """Which rows are real ([N*] bool), and the slots of all ([N*] int64, 0 if padded)."""
    slots = idx_mapping[:num_reqs]
    return slots >= 0, slots.clamp(min=0).long()


def rows_of(ends: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(0 .. count - 1, the batch row of each, whether it has one); ends: [N*] int32, where each
    batch row's range ends."""
    each = torch.arange(count, device=ends.device, dtype=torch.int32)
    rows = torch.searchsorted(ends, each, right=True)
    return each, rows.clamp(max=ends.shape[0] - 1), each < ends[-1]
