"""Prepares a step's rows for all gated delta layers: which states they continue, and from where."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operation import operation
from .rows import BLOCK, COUNT, LAG, LENGTH, SLOT, START, StateTable


def prepare_rows_reference(
    table: StateTable,
    idx_mapping: Tensor,  # [N*] int32, batch row -> slot, -1 for padded rows
    query_start_loc: Tensor,  # [N* + 1] int32
    positions: Tensor,  # [M*] int64
    log: int,
    out: Tensor,  # [7, N*] int32
) -> None:
    """Fill the values of `DeltaRows`, and set the lengths that the states will have.

    It runs once in a step, before the layers. Repeated for the same step without bulk rows it
    finds nothing left to absorb, so that the step can be run again.
    """
    null = table.values.shape[1] - 1
    is_real = idx_mapping >= 0
    slots = torch.where(is_real, idx_mapping, null).long()  # [N*] batch row -> slot
    first = query_start_loc[:-1].clamp(max=positions.shape[0] - 1).long()
    starts = torch.where(is_real, positions[first], 0).int()
    counts = query_start_loc[1:] - query_start_loc[:-1]
    known = torch.where(is_real, table.values[:, slots], 0)
    out[: BLOCK + 1] = known
    out[SLOT] = slots
    out[START] = starts
    out[LAG] = (starts - known[LENGTH]).clamp(0, log)
    out[COUNT] = counts
    ends = torch.where(counts > log, starts + counts, starts)
    table.values[LENGTH].index_copy_(0, slots, torch.where(is_real, ends, 0))


prepare_rows = operation(prepare_rows_reference, "positions", ".triton.gated_delta")
