"""Advances a drafter from one decode to the next: positions, lengths and KV slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..operation import operation


def advance_draft_decode_reference(
    positions: Tensor,  # [N*] int64, in place
    seq_lens: Tensor,  # [N*] int32, in place; 0 stays 0 (padded rows)
    max_model_len: int,
    out_write_positions: Tensor | None = None,  # [N*] int64
) -> None:
    """Advance every request by one token, but not beyond the model's last position.

    `out_write_positions` receives the positions at which KV is written. It is -1 for padded rows
    and for a request held at the last position, which already has the KV of its own token.
    """
    live = seq_lens > 0
    positions.add_(live)
    if out_write_positions is not None:
        known = live & (positions < max_model_len)
        out_write_positions.copy_(torch.where(known, positions, -1))
    positions.clamp_(max=max_model_len - 1)
    seq_lens.add_(live).clamp_(max=max_model_len)


advance_draft_decode = operation(
    advance_draft_decode_reference, "positions", ".triton.prepare_draft"
)


def map_draft_slots_reference(
    block_tables: Sequence[Tensor],  # per group [>= N*, max_blocks_g] int32, rows are batch rows
    block_sizes: Sequence[int],  # per group
    seq_lens: Tensor,  # [N*] int32, padded 0
    write_positions: Tensor,  # [N*] int64, -1 = write nothing
    out: Tensor,  # [G, >= N*] int64
) -> None:
    """Compute the KV slot of one token per request, in every group.

    It is -1, "write nothing", for padded rows, positions beyond the table and the null block 0. The
    device reads from `seq_lens` which rows are padded, so a graph may hold this.
    """
    rows = write_positions.shape[0]
    positions = write_positions.clamp(min=0)
    for group, (table, size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        column, width = positions // size, table.shape[1]
        blocks = table[:rows].gather(1, column.clamp(max=width - 1)[:, None])[:, 0].long()
        writes = (seq_lens > 0) & (write_positions >= 0) & (blocks > 0) & (column < width)
        out[group, :rows] = torch.where(writes, blocks * size + positions % size, -1)


map_draft_slots = operation(map_draft_slots_reference, "write_positions", ".triton.prepare_draft")
