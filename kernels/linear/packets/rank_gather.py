"""Gathers the tensors of all GPUs by packets; see `rank_sums` for these and their memory.

A packet holds four bytes of a tensor and the number of the exchange. Sums and gathers share the
memory and the numbers, so they may follow each other in any order that is the same on all ranks.
"""

from __future__ import annotations

from torch import Tensor

from .memory import PacketMemory


def gather_packets(x: Tensor, memory: PacketMemory) -> Tensor:
    """The x of every rank in order of ranks, bit for bit: [...] -> [size, ...]; on a GPU.

    x: contiguous, of any type and the same shape on all ranks.
    """
    from .triton.rank_gather import gather_packets as launch

    out: Tensor = launch(x, memory)
    return out


def compile_gather(x: Tensor, memory: PacketMemory) -> None:
    """As `rank_sums.compile_sum`, for `gather_packets`."""
    from .triton.rank_gather import gather_packets as launch

    launch(x, memory, only_compile=True)
