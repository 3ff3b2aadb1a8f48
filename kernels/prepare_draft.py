"""Turns the target's finished step into a drafter's inputs: shifted ids, last rows, next positions.

Row for position p carries the target's hidden state of p and the token at p + 1; positions are not
shifted. Rejected rows stay in the batch (leaving them out would need a host sync) and are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .device import use_triton


def shift_draft_ids(
    input_ids: Tensor,  # [>= M] int32, the target's ids
    query_start_loc: Tensor,  # [>= N* + 1] int32
    idx_mapping: Tensor,  # [>= N*] int32, batch row -> slot, -1 for padded rows
    num_sampled: Tensor,  # [N] int32, 0 for an unfinished prefill chunk
    num_rejected: Tensor,  # [N] int32
    last_sampled_tokens: Tensor,  # [R] int64, after post_update
    next_prefill_tokens: Tensor,  # [R] int64
    out_ids: Tensor,  # [>= M*] int32
    out_last_token_indices: Tensor,  # [>= N*] int64, batch row -> token row
    num_tokens: int,
    num_reqs_padded: int,
    num_tokens_padded: int,
) -> None:
    """Write draft ids and each request's last valid row (query start + length - rejected - 1).

    The last valid row gets the token that follows it: the newest token, or the next prompt token.
    Rows after it and padded rows get id 0; padded requests get index 0.
    """
    args = (input_ids, query_start_loc, idx_mapping, num_sampled, num_rejected)
    rest = (last_sampled_tokens, next_prefill_tokens, out_ids, out_last_token_indices)
    sizes = (num_tokens, num_reqs_padded, num_tokens_padded)
    if use_triton(input_ids):
        from .triton.prepare_draft import shift_draft_ids as shift_draft_ids_triton

        shift_draft_ids_triton(*args, *rest, *sizes)
    else:
        shift_draft_ids_reference(*args, *rest, *sizes)


def shift_draft_ids_reference(
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
    """The plain version of `shift_draft_ids`."""
    num_reqs = num_sampled.shape[0]
    slots = idx_mapping[:num_reqs]
    ends = query_start_loc[1 : num_reqs + 1]
    last = ends.long() - num_rejected - 1  # [N] batch row -> token row
    token_rows = torch.arange(num_tokens, device=input_ids.device)
    rows = torch.searchsorted(ends, token_rows.int(), right=True)  # [M] token row -> batch row
    following = torch.roll(input_ids[:num_tokens], -1)
    ids = torch.where(token_rows < last[rows], following, 0)
    sampled = last_sampled_tokens[slots]
    ids[last] = torch.where(num_sampled > 0, sampled, next_prefill_tokens[slots]).int()
    out_ids[:num_tokens] = ids
    out_ids[num_tokens:num_tokens_padded] = 0
    out_last_token_indices[:num_reqs] = last
    out_last_token_indices[num_reqs:num_reqs_padded] = 0


def start_draft_decode(
    positions: Tensor,  # [>= M] int64, the target's positions
    seq_lens: Tensor,  # [>= N] int32, the target's lengths, before rejection
    num_rejected: Tensor,  # [N] int32
    last_token_indices: Tensor,  # [>= N] int64, batch row -> token row
    out_positions: Tensor,  # [>= N*] int64, one token per request
    out_seq_lens: Tensor,  # [>= N*] int32
    num_reqs_padded: int,
) -> None:
    """Position and length of each request's last valid row: seq_len = position + 1; padded 0."""
    num_reqs = num_rejected.shape[0]
    out_positions[:num_reqs] = positions[last_token_indices[:num_reqs]]
    out_positions[num_reqs:num_reqs_padded] = 0
    out_seq_lens[:num_reqs] = seq_lens[:num_reqs] - num_rejected
    out_seq_lens[num_reqs:num_reqs_padded] = 0


def advance_draft_decode(
    positions: Tensor,  # [N*] int64, in place
    seq_lens: Tensor,  # [N*] int32, in place; 0 stays 0 (padded rows)
    max_model_len: int,
    out_write_positions: Tensor | None = None,  # [N*] int64
) -> None:
    """Move every request one token on, held at the last position that the model knows.

    `out_write_positions` is where KV belongs: -1 for padded rows and for a request that is held,
    since its last position holds the KV of the token that truly stands there.
    """
    args = (positions, seq_lens, max_model_len, out_write_positions)
    if use_triton(positions):
        from .triton.prepare_draft import advance_draft_decode as advance_draft_decode_triton

        advance_draft_decode_triton(*args)
    else:
        advance_draft_decode_reference(*args)


def advance_draft_decode_reference(
    positions: Tensor,
    seq_lens: Tensor,
    max_model_len: int,
    out_write_positions: Tensor | None = None,
) -> None:
    """The plain version of `advance_draft_decode`."""
    live = seq_lens > 0
    positions.add_(live)
    if out_write_positions is not None:
        known = live & (positions < max_model_len)
        out_write_positions.copy_(torch.where(known, positions, -1))
    positions.clamp_(max=max_model_len - 1)
    seq_lens.add_(live).clamp_(max=max_model_len)


def map_draft_slots(
    block_tables: Sequence[Tensor],  # per group [>= N*, max_blocks_g] int32, rows are batch rows
    block_sizes: Sequence[int],  # per group
    seq_lens: Tensor,  # [N*] int32, padded 0
    write_positions: Tensor,  # [N*] int64, -1 = write nothing
    out: Tensor,  # [G, >= N*] int64
) -> None:
    """KV slot of one token per request, -1 ("write nothing") for padded rows, for positions outside
    the table and for the null block. What is padding stands in `seq_lens`: a graph may hold this.
    """
    args = (block_tables, block_sizes, seq_lens, write_positions, out)
    if use_triton(write_positions):
        from .triton.prepare_draft import map_draft_slots as map_draft_slots_triton

        map_draft_slots_triton(*args)
    else:
        map_draft_slots_reference(*args)


def map_draft_slots_reference(
    block_tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    seq_lens: Tensor,
    write_positions: Tensor,
    out: Tensor,
) -> None:
    """The plain version of `map_draft_slots`."""
    rows = write_positions.shape[0]
    positions = write_positions.clamp(min=0)
    for group, (table, size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        column, width = positions // size, table.shape[1]
        blocks = table[:rows].gather(1, column.clamp(max=width - 1)[:, None])[:, 0].long()
        writes = (seq_lens > 0) & (write_positions >= 0) & (blocks > 0) & (column < width)
        out[group, :rows] = torch.where(writes, blocks * size + positions % size, -1)
