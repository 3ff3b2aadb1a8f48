"""Sums over GPUs of one machine for few rows, by packets: see `kernels.linear.packets.rank_sums`.

They take in the parts of a split product and the residual, which would be kernels of their own
before and after any other sum. What is gathered is sent by packets, too, if it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.linear.packets.memory import PROGRAMS, PacketMemory, gather_fits, packets_fit
from ...kernels.linear.packets.rank_gather import gather_packets
from ...kernels.linear.packets.rank_sums import sum_packets
from .small_sums import all_can

_KIB = 1 << 10
# Bytes of the sum, or of a rank's part of what is gathered, up to which packets are used, by the
# number of GPUs: every rank writes them twice over to each other one.
_MOST_BYTES = {2: 1024 * _KIB, 3: 256 * _KIB, 4: 256 * _KIB}
_MOST_OF_MANY = 128 * _KIB
_TRIAL = (3, 4096)  # rows and numbers


class PacketSums:
    """Sums and gathers by packets, on one stream at a time. May be recorded in graphs."""

    def __init__(self, memory: PacketMemory) -> None:
        self._memory = memory

    def fit(self, num_rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether rows [num_rows, width] of a type should be added up this way."""
        num_bytes = num_rows * width * dtype.itemsize
        return num_bytes <= self._most_bytes and packets_fit(num_rows, width, dtype)

    @property
    def _most_bytes(self) -> int:
        return _MOST_BYTES.get(self._memory.size, _MOST_OF_MANY)

    def sum(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """residual + the sum of x over the ranks; see `rank_sums.sum_packets`."""
        if residual is not None:
            residual = residual.contiguous()
        return sum_packets(x.contiguous(), self._memory, dtype, residual)

    def gathers(self, x: Tensor) -> bool:
        """Whether x, contiguous, should be gathered this way."""
        return x.nbytes <= self._most_bytes and gather_fits(x)

    def gather(self, x: Tensor) -> Tensor:
        """The x of every rank: [...] -> [size, ...]; see `rank_gather.gather_packets`."""
        return gather_packets(x, self._memory)


def silent_packets(size: int, device: torch.device) -> PacketSums:
    """Sums without other ranks, for models of meta tensors: as those of the first rank."""
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return PacketSums(PacketMemory(0, size, empty, (1 << 40,) * size, empty.int()))


def open_packet_sums(
    rank: int,
    size: int,
    device: torch.device,
    least: Callable[[Sequence[int]], list[int]],
    group: Any = None,
) -> PacketSums | None:
    """Exchange memory with the other ranks of a process group, and try a sum.

    The GPUs must be able to share memory (`small_sums` has tried it). All ranks return None, and
    log why, if one of them cannot. Arguments: see `small_sums.open_small_sums`.
    """
    made: list[Any] = []

    def exchange() -> None:
        import torch.distributed._symmetric_memory as symmetric

        count = PacketMemory.num_bytes(size)
        mine = symmetric.empty(count, dtype=torch.uint8, device=device)
        mine.zero_()
        own: Any = dist.group.WORLD if group is None else group
        handle = symmetric.rendezvous(mine, own.group_name)
        torch.cuda.synchronize(device)
        dist.barrier(group=group)  # nobody writes to memory that its owner has not cleared
        peers = tuple(int(address) for address in handle.buffer_ptrs)
        sums = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        memory = PacketMemory(rank, size, mine.view(torch.int64), peers, sums)
        made.extend((handle, PacketSums(memory)))

    def try_out() -> None:
        rows, width = _TRIAL
        x = torch.arange(rows * width, device=device).view(rows, width) % 61 * (rank + 1)
        expected = x.clone()
        dist.all_reduce(expected, group=group)
        for _ in range(3):  # both halves of the memory, and the first one again
            got = made[1].sum(x.bfloat16(), torch.bfloat16)
            if not torch.equal(got.long(), expected):
                raise RuntimeError("the sums are wrong")
            parts = made[1].gather(x.float())
            if not torch.equal(parts.sum(0).long(), expected):
                raise RuntimeError("what is gathered is wrong")

    if not all_can(
        (exchange, try_out),
        least,
        "sums over the GPUs take several kernels, which is slower",
        "another rank could not exchange packets",
    ):
        return None
    sums: PacketSums = made[1]
    return sums
