"""Log probabilities of logits, with sums in an order that does not depend on the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operation import operation


def log_probs_reference(logits: Tensor) -> Tensor:
    """The logarithm of the softmax of each row: [L, V] of any float type -> [L, V] float32."""
    return logits.float().log_softmax(-1)


log_probs = operation(
    log_probs_reference, "logits", ".triton.log_probs", lambda logits: logits.shape[0] > 0
)


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of values [L, V] float32, and their columns [L, count].

    Among equals the lowest column comes first, so that fewer are a prefix of more.
    """
    bits = values.contiguous().view(torch.int32)
    # as signed integers, these are in the order of the floats
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    columns = torch.arange(values.shape[1], device=values.device)
    best = ((ordered << 32) | (_COLUMNS - columns)).topk(count, dim=1).values
    chosen = _COLUMNS - (best & _COLUMNS)
    return values.gather(1, chosen), chosen


_COLUMNS = 0xFFFFFFFF
