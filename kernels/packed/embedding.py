"""Gathers rows of a quantised embedding table."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import use_triton
from ..quant.tiled import TiledWeight, Weight


def packed_embedding(ids: Tensor, table: Weight, dtype: torch.dtype) -> Tensor:
    """The numbers of rows `ids` [M] int32 or int64 of a table [V, H]: [M, H]."""
    if isinstance(table, TiledWeight) and table.order is None and use_triton(table.words):
        from ..quant.triton.widen import widen

        rows: Tensor = widen(table, dtype, ids)
        return rows
    return table.rows(ids, dtype)
