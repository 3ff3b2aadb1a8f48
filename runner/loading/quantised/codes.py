"""Takes codes of a few bits out of packed integers, and packs two 4-bit codes into a byte.

Everything also works on meta tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(words: Tensor) -> Tensor:
    """The bytes of int32 words [R, C], the lowest first: uint8 [R, 4 C]."""
    if words.stride(-1) != 1:  # which `contiguous` leaves where rows have one word
        words = words.clone(memory_format=torch.contiguous_format)
    return words.contiguous().view(torch.uint8)


def codes_of(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of int32 words [R, C]: uint8 [R, count].

    Codes of 4 or 8 bits follow one another from the lowest bit on.
    """
    stored = bytes_of(words)
    if bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(1)
    return stored[:, :count].contiguous()


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15 in uint8 [N, K], two in a byte: [N, ceil(K / 2)], the even column low."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()


def signed(codes: Tensor) -> Tensor:
    """8-bit codes, stored plus 128, as int8."""
    return (codes ^ 128).view(torch.int8)


def split_last(tensor: Tensor, *sizes: int) -> Tensor:
    """The tensor with its last dimension as several of these sizes."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)
