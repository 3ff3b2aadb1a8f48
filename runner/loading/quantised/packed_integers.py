"""Integers of 4 or 8 bits as compressed-tensors packs them (`pack-quantized`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels.quant.packed import Kind, PackedWeight
from .codes import bytes_of, codes_of, pack_nibbles, signed
from .float8 import FLOATS
from .parts import Parts


def read_packed_integers(parts: Parts) -> PackedWeight:
    """`weight_packed` int32 [N, ceil(K bits / 32)] holds codes plus 2 ** (bits - 1), in order.

    `weight_shape` is [N, K]. Zero points, if any, are packed in the same way along the rows.
    """
    stored = parts.take("weight_packed", (torch.int32,), (None, None))
    rows, columns = map(int, parts.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist())
    bits = next((b for b in (4, 8) if stored.shape == (rows, -(-columns * b // 32))), None)
    if bits is None or columns < 1:
        raise parts.wrong(
            f"is packed as {list(stored.shape)}, which is not a matrix of shape "
            f"{[rows, columns]} in 4 or 8 bits"
        )
    scales = parts.take("weight_scale", FLOATS)
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, 1)
    if scales.dim() != 2 or scales.shape[0] != rows:
        raise parts.wrong(f"has {rows} rows, but its scales have shape {list(scales.shape)}")
    group = parts.group(columns, scales.shape[1])
    fields: dict[str, Any] = {"activations": parts.activations}
    if "weight_zero_point" in parts:
        size = (-(-rows * bits // 32), scales.shape[1])
        zeros = parts.take("weight_zero_point", (torch.int32,), size)
        fields["zeros"] = integer_zeros(codes_of(zeros.T, bits, rows).T, bits)
    order = None
    if "weight_g_idx" in parts:
        index = parts.take("weight_g_idx", (torch.int32, torch.int64), (columns,))
        order = column_order(parts, index, group)
    return integer_weight(stored, bits, columns, scales.contiguous(), group, order, fields)


def integer_weight(
    words: Tensor,  # int32 [N, C], codes of each row in order from the lowest bit on
    bits: int,
    columns: int,
    scales: Tensor,
    group: int,
    order: Tensor | None,
    fields: dict[str, Any],
) -> PackedWeight:
    """The matrix of these words, with its columns sorted by group if there is an `order`."""
    kind: Kind = "int4" if bits == 4 else "int8"
    if order is not None:
        codes = codes_of(words, bits, columns).index_select(1, order)
        values = pack_nibbles(codes) if bits == 4 else signed(codes)
        fields = fields | {"order": order.int()}
    elif bits == 4:
        values = bytes_of(words)[:, : -(-columns // 2)].contiguous()
    else:
        values = signed(bytes_of(words)[:, :columns].contiguous())
    return PackedWeight(kind, values, scales, columns, group, **fields)


def integer_zeros(codes: Tensor, bits: int) -> Tensor:
    """Zero points [N, G] of stored codes in uint8, as `PackedWeight` wants them."""
    return (codes if bits == 4 else signed(codes.contiguous())).contiguous()


def column_order(parts: Parts, index: Tensor, group: int) -> Tensor | None:
    """The order [K] int64 that sorts columns by group; None if they are sorted.

    `index` [K] is the group of each column.
    """
    if index.is_meta:
        acts = parts.quantisation is not None and parts.quantisation.act_order
        return torch.empty_like(index, dtype=torch.int64) if acts else None
    columns = len(index)
    expected = torch.arange(columns, device=index.device) // group
    if torch.equal(index.long(), expected):
        return None
    order = index.long().argsort(stable=True)
    if not torch.equal(index.long()[order], expected):
        raise parts.wrong(f"has a g_idx whose groups do not have {group} columns each")
    return order
