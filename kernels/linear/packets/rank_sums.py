"""Sums over GPUs that write packets into each other's memory, with the parts of a split product
and the residual in the same kernel.

A packet of 8 bytes holds two 16-bit numbers and the number of the sum, so that who waits for it
needs no other signal: it has arrived when it bears the number of this sum. NCCL calls the idea its
low-latency protocol. It doubles the bytes, which only pays where these are few.

A packet is written and read as one aligned word of 8 bytes, which arrives whole, and nothing is
assumed of the order of packets. The reader asks memory anew each time (volatile loads).

It asks without a limit, because a limit that a slow rank can pass would make wrong sums. If a rank
never sends, the others' kernels run until their processes end: `runner.parallel.group` ends them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import PacketMemory


def sum_packets(
    x: Tensor, memory: PacketMemory, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """residual + the sum of x over the ranks, [M, H] of `dtype`; on a GPU.

    x: [M, H] of `dtype`, or parts [S, M, H] of it, perhaps in float32, which are added up first;
    contiguous. residual: [M, H]. A rank's part, the sum and the result are each rounded to `dtype`.
    The order of the ranks is the same everywhere, so that all get the same bits.
    """
    from .triton.rank_sums import sum_packets as launch

    out: Tensor = launch(x, memory, dtype, residual)
    return out


def compile_sum(x: Tensor, memory: PacketMemory, dtype: torch.dtype) -> None:
    """Compile and load what `sum_packets` would launch, without a launch.

    Neither the addresses in `memory` nor its tensors' sizes matter. Raises whatever Triton or the
    driver refuses.
    """
    from .triton.rank_sums import sum_packets as launch

    launch(x, memory, dtype, only_compile=True)


def sum_packets_reference(
    everyones: list[Tensor], dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """The plain version of `sum_packets`, given the x of every rank."""
    total = torch.zeros((), device=everyones[0].device)
    for x in everyones:
        own = x.float().sum(0) if x.dim() == 3 else x
        total = total + own.to(dtype).float()
    out = total.to(dtype)
    return out if residual is None else (out.float() + residual.float()).to(dtype)
