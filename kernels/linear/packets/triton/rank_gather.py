"""Triton version of `kernels.linear.packets.rank_gather`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions, pdl_options, wait_for_inputs
from ..memory import WORDS, PacketMemory, gather_fits
from .exchange import send_words, words_of

_WORDS = tl.constexpr(WORDS)


@triton.jit(do_not_specialize=["count"])
def _rank_gather_kernel(
    x,  # [count] int32
    out,  # [RANKS, count] int32
    mine,  # as the rest in `PacketMemory`
    peers,
    sums,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, _WORDS)
    at = program * _WORDS + word
    inside = at < count
    wait_for_inputs(PDL)
    number = tl.load(sums + program) + 1
    own = tl.load(x + at, mask=inside, other=0)
    place = send_words(own, peers, number, program, RANK, RANKS)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            words = own
        else:
            words = words_of(rank, mine, number, place)
        tl.store(out + rank * count + at, words, mask=inside)
    tl.store(sums + program, number)


def gather_packets(x: Tensor, memory: PacketMemory, only_compile: bool = False) -> Tensor:
    """See `kernels.linear.packets.rank_gather`: `gather_packets` or, with `only_compile`,
    `compile_gather`."""
    assert gather_fits(x)
    words = x.view(-1).view(torch.int32)
    out = torch.empty(memory.size, *x.shape, dtype=x.dtype, device=x.device)
    count = words.shape[0]
    kernel = _rank_gather_kernel.run(
        words, out.view(-1).view(torch.int32), memory.mine, memory.peers, memory.sums, count,
        RANK=memory.rank, RANKS=memory.size, num_warps=4, **pdl_options(x),
        grid=(triton.cdiv(count, WORDS),), warmup=only_compile,
    )  # fmt: skip
    if only_compile and kernel is not None:  # the interpreter has none
        assert kernel.run is not None  # asking for it loads the kernel onto the GPU
    return out


hash_functions(globals())
