"""Gathers rows of an embedding table or of any other matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..operation import operation


def embedding_reference(ids: Tensor, table: Tensor) -> Tensor:
    """Return table[ids], [M, H]. ids: [M] int32 or int64; table: [V, H], with any row stride."""
    return F.embedding(ids, table)


embedding = operation(
    embedding_reference, "table", ".triton.embedding", lambda ids, table: ids.dim() == 1
)
