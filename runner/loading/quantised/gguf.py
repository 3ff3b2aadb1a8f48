"""Turns GGUF's quantised rows into packed weights, with the same numbers bit for bit.

A number keeps the bits that it has in the file: 4, 5, 6 or 8. The K types keep two levels of
scales: one of 8 bits a group, and one for 256 columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ....kernels.cpu.formats import StoredRows, WeightType
from ....kernels.quant.packed import HIGH_BITS, Kind, PackedWeight, pack_bits
from .codes import pack_nibbles, split_last

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# (codes [N, B, block], scales [N, B, groups], offsets of the same shape or None); of the K types
# then come the super scales and super offsets, [N, B, 1]. Codes of 8 bits are int8, others uint8.
_Read = tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]


def packed_rows(rows: StoredRows, device: torch.device) -> PackedWeight | Tensor:
    """A stored matrix on `device`: packed, or a plain tensor if its numbers are floats."""
    if device.type == "meta":
        return _outline(rows.type, rows.shape)
    data = torch.from_numpy(rows.data.copy()).to(device)  # torch takes no read-only memory
    if rows.order is not None:
        data = data[torch.from_numpy(rows.order).to(device)]
    return _packed(rows.type, rows.shape, data)


@functools.lru_cache
def _outline(type: WeightType, shape: tuple[int, int]) -> PackedWeight | Tensor:
    """Shared by equal matrices, because models with experts have thousands."""
    data = torch.empty(shape[0], type.row_bytes(shape[1]), dtype=torch.uint8, device="meta")
    return _packed(type, shape, data)


def _packed(type: WeightType, shape: tuple[int, int], data: Tensor) -> PackedWeight | Tensor:
    """The matrix [N, K] of rows of bytes."""
    count, columns = shape
    if type.is_float:
        return data.view(_FLOATS[type.name])
    blocks = data.view(count, -1, type.block_bytes)
    if type.name == "MXFP4":  # its scale, 2 ** (e - 127), comes first
        codes = pack_nibbles(_nibbles(blocks, 1).reshape(count, columns))
        return PackedWeight("fp4", codes, blocks[..., 0].contiguous(), columns, 32)
    codes, scales, offsets, *supers = _READERS[type.name](blocks)
    group = type.block_size // scales.shape[-1]
    codes = codes.reshape(count, columns)
    kind = _KINDS[type.name[:2]]
    bits = HIGH_BITS.get(kind)
    return PackedWeight(
        kind,
        codes if kind == "int8" else pack_nibbles(codes if bits is None else codes & 15),
        scales.reshape(count, -1).contiguous(),
        columns,
        group,
        offsets=None if offsets is None else offsets.reshape(count, -1).contiguous(),
        super_scales=supers[0].reshape(count, -1) if supers else None,
        super_offsets=supers[1].reshape(count, -1) if supers and offsets is not None else None,
        high=None if bits is None else pack_bits(codes >> 4, bits),
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block [N, B, bytes]: [N, B, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _shifts(blocks: Tensor, count: int, step: int = 1) -> Tensor:
    """0, step, 2 step ...; in uint8, since results of int64 would take eight times the memory."""
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=blocks.device)


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """32 codes in 16 bytes, first all low nibbles: [N, B, 32] uint8."""
    stored = blocks[..., at : at + 16]
    return torch.cat((stored & 15, stored >> 4), -1)


def _bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits in 4 bytes, the lowest first: [N, B, 32] uint8 of 0 and 1."""
    stored = blocks[..., at : at + 4].unsqueeze(-1)
    return (stored >> _shifts(blocks, 8) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> _Read:
    return _nibbles(blocks, 2), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Read:
    return _nibbles(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Read:
    return _nibbles(blocks, 6) | _bits(blocks, 2) << 4, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Read:
    return _nibbles(blocks, 8) | _bits(blocks, 4) << 4, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and offsets of the eight groups of 32 in a block of Q4_K or Q5_K: [N, B, 8] uint8,
    and those of the block. A minimum is subtracted, so the block's offset is negative.

    12 bytes hold two 6-bit numbers a group: whole for the first four, in pieces for the others.
    """
    low, high, rest = split_last(blocks[..., 4:16], 3, 4).unbind(-2)
    factors = torch.cat((low & 63, rest & 15 | low >> 2 & 48), -1)
    minima = torch.cat((high & 63, rest >> 4 | high >> 2 & 48), -1)
    return factors, minima, _half(blocks, 0), -_half(blocks, 2)


def _k_nibbles(stored: Tensor) -> Tensor:
    """[N, B, 128] bytes -> [N, B, 8, 32] codes: two groups share 32 bytes, the first is low."""
    pairs = split_last(stored, 4, 32)
    return torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> _Read:
    return _k_nibbles(blocks[..., 16:144]), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> _Read:
    high = blocks[..., 16:48].unsqueeze(-2) >> _shifts(blocks, 8).view(8, 1)
    return _k_nibbles(blocks[..., 48:176]) | (high & 1) << 4, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> _Read:
    halves = split_last(blocks[..., :128], 2, 64)
    low = torch.stack((halves & 15, halves >> 4), -2).flatten(-3)
    quads = split_last(blocks[..., 128:192], 2, 1, 32)
    high = (quads >> _shifts(blocks, 4, 2).view(4, 1) & 3).flatten(-3)
    factors = blocks[..., 192:208].contiguous().view(torch.int8)
    scale = _half(blocks, 208)
    return low | high << 4, factors, None, scale, scale


_KINDS: dict[str, Kind] = {"Q4": "int4", "Q5": "int5", "Q6": "int6", "Q8": "int8"}
_READERS: dict[str, Callable[[Tensor], _Read]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
