"""Gathers rows of an embedding table or of any other matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import use_triton


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Return table[ids], [M, H]. ids: [M] int32 or int64; table: [V, H], with any row stride."""
    if ids.dim() == 1 and use_triton(table):
        from .triton import embedding as triton_embedding

        out: Tensor = triton_embedding.embedding(ids, table)
        return out
    return F.embedding(ids, table)
