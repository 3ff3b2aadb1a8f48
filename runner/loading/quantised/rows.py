"""Turns packed weights into GGUF's block formats, which the native CPU kernels multiply, if that
changes no number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.formats import WEIGHT_TYPES, StoredRows
from ....kernels.quant.packed import NIBBLES, PackedWeight
from .codes import split_last

_BLOCK = 32  # columns of a block of Q4_0, Q4_1 and Q8_0


def stored_rows_of(weight: PackedWeight) -> StoredRows | None:
    """The same numbers as Q4_0, Q4_1 or Q8_0; None if these cannot hold them.

    Blocks have fp16 scales and the order of input features.
    """
    columns = weight.columns
    whole = weight.group in (columns, *range(_BLOCK, columns, _BLOCK))
    if weight.kind not in ("int4", "int8") or columns % _BLOCK or not whole:
        return None
    if weight.order is not None or (weight.kind == "int8" and weight.zeros is not None):
        return None
    weight = weight.one_level()
    scales = _exact_half(weight.scales)
    offsets = None if weight.offsets is None else _exact_half(weight.offsets)
    if weight.zeros is not None:
        offsets = _exact_half(-(weight.zeros.float() * weight.scales.float()))
    wants_offsets = weight.zeros is not None or weight.offsets is not None
    if scales is None or (wants_offsets and offsets is None):
        return None
    if weight.kind == "int8" and wants_offsets:
        return None
    fields = [scales] if offsets is None else [scales, offsets]
    head = torch.cat([_by_block(field, weight) for field in fields], -1)
    data = torch.cat((head, _codes(weight)), -1).flatten(1)
    name = "Q8_0" if weight.kind == "int8" else "Q4_0" if offsets is None else "Q4_1"
    return StoredRows(WEIGHT_TYPES[name], np.ascontiguousarray(data.numpy()), columns)


def _exact_half(numbers: Tensor) -> Tensor | None:
    """The numbers in fp16 if that is exact."""
    half = numbers.half()
    return half if torch.equal(half.float(), numbers.float()) else None


def _by_block(grouped: Tensor, weight: PackedWeight) -> Tensor:
    """fp16 [N, G] -> the bytes for each block: [N, blocks, 2] uint8."""
    spread = grouped.repeat_interleave(weight.group // _BLOCK, 1)[:, : weight.columns // _BLOCK]
    return spread.contiguous().view(torch.uint8).view(weight.shape[0], -1, 2)


def _codes(weight: PackedWeight) -> Tensor:
    """The codes of each block as bytes: [N, blocks, 16 or 32] uint8."""
    values = weight.values.contiguous()
    if weight.kind not in NIBBLES:
        return split_last(values.view(torch.uint8), -1, _BLOCK)
    codes = split_last(torch.stack((values & 15, values >> 4), -1).flatten(1), -1, _BLOCK)
    return codes[..., :16] | codes[..., 16:] << 4
