"""The memory through which GPUs exchange packets for their sums; see `rank_sums`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = 512  # packets of a program
PROGRAMS = 512  # most of a launch


@dataclass(frozen=True)
class PacketMemory:
    """The memory through which the ranks exchange packets, as one of them sees it.

    Two sums in a row use two halves of it. A rank sends a sum's packets only after it has received
    those of the sum before, and who sent these had read all of the sum before that: so no packet
    is overwritten before it was read.
    """

    rank: int
    size: int
    mine: Tensor  # [2, PROGRAMS, size, WORDS] int64, which the others write
    peers: tuple[int, ...]  # the address of each rank's `mine`
    sums: Tensor  # [PROGRAMS] int32, how many sums each program has made

    @staticmethod
    def num_bytes(size: int) -> int:
        """Of `mine`."""
        return 2 * PROGRAMS * size * WORDS * 8


def num_programs(num_rows: int, width: int) -> int:
    """The programs that add up rows [num_rows, width]; only up to `PROGRAMS` can."""
    return num_rows * -(-width // (2 * WORDS))


def packets_fit(num_rows: int, width: int, dtype: torch.dtype) -> bool:
    """Whether `sum_packets` can add up rows [num_rows, width] of this type."""
    is_short = dtype in (torch.bfloat16, torch.float16)
    return is_short and width % 8 == 0 and 0 < num_programs(num_rows, width) <= PROGRAMS


def gather_fits(x: Tensor) -> bool:
    """Whether `gather_packets` can gather x: whole words of four bytes, and not too many."""
    words, rest = divmod(x.nbytes, 4)
    aligned = not rest and x.storage_offset() * x.itemsize % 4 == 0
    return aligned and x.is_contiguous() and 0 < words <= PROGRAMS * WORDS
