"""Integers as AutoAWQ and GPTQ pack them: transposed, with groups along the first dimension."""

from __future__ import annotations

from typing import Any

import torch

from ....kernels.quant.packed import PackedWeight
from .codes import bytes_of, codes_of, pack_nibbles
from .float8 import FLOATS
from .packed_integers import column_order, integer_weight, integer_zeros
from .parts import Parts

# Column c of eight is in this nibble of an AWQ word.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(parts: Parts) -> PackedWeight:
    """`qweight` int32 [K, N / 8], `qzeros` int32 [K / group, N / 8], `scales` [K / group, N].

    A number is (code - zero) * scale.
    """
    stored = parts.take("qweight", (torch.int32,), (None, None))
    columns, rows = stored.shape[0], stored.shape[1] * 8
    scales = parts.take("scales", FLOATS, (None, rows))
    group = parts.group(columns, scales.shape[0])
    fields: dict[str, Any] = {}
    if "qzeros" in parts:
        zeros = parts.take("qzeros", (torch.int32,), (scales.shape[0], stored.shape[1]))
        fields["zeros"] = _awq_codes(zeros).T.contiguous()
    values = pack_nibbles(_awq_codes(stored).T)
    return PackedWeight("int4", values, scales.T.contiguous(), columns, group, **fields)


def _awq_codes(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8 C], in the order of columns."""
    rows = words.shape[0]
    stored = bytes_of(words)
    nibbles = torch.stack((stored & 15, stored >> 4), -1).view(rows, -1, 8)
    return torch.stack([nibbles[..., n] for n in _AWQ_NIBBLES], -1).view(rows, -1)


def read_gptq(parts: Parts) -> PackedWeight:
    """`qweight` int32 [K bits / 32, N], `qzeros` int32 [K / group, N bits / 32], `scales`
    [K / group, N], and `g_idx` [K], the group of each input feature.

    A number is (code - zero) * scale. GPTQ's first format stores words of zero points minus 1 in
    each place, and a zero point of 0 borrows from the next place.
    """
    stored = parts.take("qweight", (torch.int32,), (None, None))
    rows = stored.shape[1]
    scales = parts.take("scales", FLOATS, (None, rows))
    zeros = parts.take("qzeros", (torch.int32,), (scales.shape[0], None))
    sizes = (8, 4) if parts.scheme is not None and parts.scheme.kind == "int8" else (4, 8)
    bits = next((b for b in sizes if zeros.shape[1] == -(-rows * b // 32)), None)
    if bits is None:
        raise parts.wrong(
            f"has {zeros.shape[1]} words of zero points for {rows} rows, which is not 4 or 8 bits "
            "each"
        )
    columns = stored.shape[0] * 32 // bits
    order, group = None, parts.group(columns, scales.shape[0])
    if "g_idx" in parts:
        index = parts.take("g_idx", (torch.int32, torch.int64), (columns,))
        order = column_order(parts, index, group)
    assert parts.quantisation is not None
    if parts.quantisation.zero_less_one:
        zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)  # wraps around
    found = integer_zeros(codes_of(zeros, bits, rows).T, bits)
    symmetric = parts.scheme is None or parts.scheme.symmetric
    middle = 8 if bits == 4 else 0
    fields: dict[str, Any] = {}
    if not symmetric or not (found.is_meta or bool((found == middle).all())):
        fields["zeros"] = found
    return integer_weight(stored.T, bits, columns, scales.T.contiguous(), group, order, fields)
