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
from ...kernels.linear.packets.rank_gather import compile_gather, gather_packets
from ...kernels.linear.packets.rank_sums import compile_sum, sum_packets
from .small_sums import GiveUp, all_can

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
    return PacketSums(_no_memory(0, size, device))


def _no_memory(rank: int, size: int, device: torch.device) -> PacketMemory:
    """What stands for the memory where kernels are only compiled."""
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return PacketMemory(rank, size, empty, (1 << 40,) * size, empty.int())


def trial_of(rank: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a rank adds in the trial, and the sum of all: [rows, width], exact in bf16."""
    rows, width = _TRIAL
    one = torch.arange(rows * width, device=device).view(rows, width) % 7
    return (one * (rank + 1)).bfloat16(), (one * (size * (size + 1) // 2)).bfloat16()


def open_packet_sums(
    rank: int,
    size: int,
    device: torch.device,
    least: Callable[[Sequence[int]], list[int]],
    group: Any = None,
    give_up: GiveUp | None = None,
) -> PacketSums | None:
    """Compile the kernels, exchange memory with the other ranks of a process group, and try sums.

    The GPUs must be able to share memory (`small_sums` has tried it). All ranks return None, and
    log why, if one of them cannot. Arguments: see `small_sums.open_small_sums`.
    """
    made: list[Any] = []

    def compile_kernels() -> None:
        made.extend(trial_of(rank, size, device))
        memory = _no_memory(rank, size, device)
        compile_sum(made[0], memory, torch.bfloat16)
        compile_gather(made[0].float(), memory)

    def allocate() -> None:
        import torch.distributed._symmetric_memory as symmetric

        count = PacketMemory.num_bytes(size)
        mine = symmetric.empty(count, dtype=torch.uint8, device=device)
        mine.zero_()
        made.extend((mine, torch.zeros(PROGRAMS, dtype=torch.int32, device=device)))
        torch.cuda.synchronize(device)  # nobody writes to memory that its owner has not cleared

    def exchange() -> None:
        import torch.distributed._symmetric_memory as symmetric

        _, _, mine, sums = made
        own: Any = dist.group.WORLD if group is None else group
        handle = symmetric.rendezvous(mine, own.group_name)
        peers = tuple(int(address) for address in handle.buffer_ptrs)
        memory = PacketMemory(rank, size, mine.view(torch.int64), peers, sums)
        made.extend((handle, PacketSums(memory)))

    def try_out() -> None:
        x, expected = made[:2]
        # Both halves of the memory, and the first one again. A rank that stopped at a wrong sum
        # would leave the others waiting in the next one.
        sums = [made[-1].sum(x, torch.bfloat16) for _ in range(3)]
        parts = [made[-1].gather(x.float()) for _ in range(3)]
        if not all(torch.equal(got, expected) for got in sums):
            raise RuntimeError("the sums are wrong")
        if not all(torch.equal(got.sum(0).bfloat16(), expected) for got in parts):
            raise RuntimeError("what is gathered is wrong")

    loss = "sums over the GPUs take several kernels, which is slower"
    # Compilation comes first: the kernels of the other ranks would wait for a rank that fails.
    other = "another rank could not compile the kernels"
    if not all_can((compile_kernels,), least, loss, other, seconds=None):
        return None
    steps = (allocate, exchange, try_out)
    other = "another rank could not exchange packets"
    if not all_can(steps, least, loss, other, give_up=give_up):
        return None
    sums: PacketSums = made[-1]
    return sums
