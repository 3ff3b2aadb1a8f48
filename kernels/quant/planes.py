"""The words of codes of 5 and 6 bits: a plane of 4 bits, and a plane of the other bit or two.

A word of the first plane holds 4 bits of the codes of 4 slices. A word of the second one holds the
other bits of a span's slices: of 16 slices, or of 8. Of even slices the first plane has the low 4
bits of a code, of odd ones the high 4. So the bits of two neighbouring slices lie where one shift
of a word of the second plane takes them beside those of the first, and masks do the rest:
see `triton.plane_codes`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .packed import HIGH_BITS, Kind, pack_bits, unpack_bits

WIDTH = 16  # words of a row in a span of each plane, and columns of a slice
LOW_SLICES = 4  # codes in a word of the first plane
STEP_SLICES = 8  # slices that kernels multiply at once


def plane_slices(kind: Kind) -> int:
    """Codes in a word of the second plane: slices of a span."""
    return 16 // HIGH_BITS[kind]


def words_of_row(kind: Kind, columns: int) -> tuple[int, int]:
    """Words of a row of K columns in each plane."""
    low, high = (-(-columns // (WIDTH * own)) for own in (LOW_SLICES, plane_slices(kind)))
    return low * WIDTH, high * WIDTH


def has_small_planes(group: int) -> bool:
    """Whether kernels know groups of so many columns: whole slices, few of them."""
    return group in (16, 32)


def plane_words(values: Tensor, high: Tensor, kind: Kind, columns: int) -> tuple[Tensor, Tensor]:
    """Stored values [n, ceil(K / 2)] and high bits [n, ...] as words of both planes.

    Returns int16 [n, ceil(K / 64) * 16] and [n, spans * 16], padded with zeros.
    """
    bits, slices = HIGH_BITS[kind], plane_slices(kind)
    codes = unpack_bits(values, 4)[:, :columns]
    codes |= unpack_bits(high, bits)[:, :columns] << 4
    spans = -(-columns // (slices * WIDTH))
    padded = functional.pad(codes, (0, spans * slices * WIDTH - columns))
    even, odd = padded.view(-1, spans, slices // 2, 2, WIDTH).int().unbind(3)
    pairs = torch.arange(slices // 2, device=values.device)[:, None]
    low = (even & 15 | odd >> bits << 4) << pairs % 2 * 8
    low = low.view(-1, spans, slices // LOW_SLICES, 2, WIDTH).sum(3, dtype=torch.int32)
    rest = (odd & (1 << bits) - 1 | even >> 4 << bits) << pairs * 2 * bits
    words = low.to(torch.int16).flatten(1)  # keeps the low bits
    needed = words_of_row(kind, columns)[0]
    return words[:, :needed], rest.sum(2, dtype=torch.int32).to(torch.int16).flatten(1)


def plane_values(words: Tensor, high: Tensor, kind: Kind, columns: int) -> tuple[Tensor, Tensor]:
    """The inverse of `plane_words`: stored values and high bits of a `PackedWeight`."""
    bits, slices = HIGH_BITS[kind], plane_slices(kind)
    spans = high.shape[1] // WIDTH
    low = functional.pad(words, (0, spans * WIDTH * slices // LOW_SLICES - words.shape[1])).int()
    shifts = torch.arange(0, 16, 4, device=words.device)[:, None]
    nibbles = low.view(-1, spans, slices // LOW_SLICES, 1, WIDTH) >> shifts & 15
    even, odd = nibbles.view(-1, spans, slices // 2, 2, WIDTH).unbind(3)
    shifts = torch.arange(0, 16, 2 * bits, device=words.device)[:, None]
    rest = high.view(-1, spans, 1, WIDTH).int() >> shifts
    mask = (1 << bits) - 1
    even = even | (rest >> bits & mask) << 4
    odd = odd << bits | rest & mask
    codes = torch.stack((even, odd), 3).flatten(1)[:, :columns].to(torch.uint8)
    return pack_bits(codes & 15, 4), pack_bits(codes >> 4, bits)


def side_by_side(grouped: Tensor) -> Tensor:
    """Scales [N, groups], 4 bytes of neighbouring groups of a row together:
    [ceil(groups / P), N, P]."""
    count = 4 // grouped.element_size()
    padded = functional.pad(grouped, (0, -grouped.shape[1] % count))
    return padded.view(len(grouped), -1, count).transpose(0, 1).contiguous()


def by_group(stored: Tensor, groups: int) -> Tensor:
    """The inverse of `side_by_side`."""
    return stored.transpose(0, 1).flatten(1)[:, :groups]
