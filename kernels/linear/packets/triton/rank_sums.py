"""Triton version of `kernels.linear.packets.rank_sums`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions, pdl_options, wait_for_inputs
from ..memory import WORDS, PacketMemory, packets_fit
from .exchange import send_words, words_of

_WORDS = tl.constexpr(WORDS)


@triton.jit
def _value(words, DTYPE: tl.constexpr):
    """The lower halves of some words, as numbers."""
    return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _rank_sum_kernel(
    x,  # [M, H]; PARTS: [PARTS, M, H], of 16 bits or float32
    residual,  # [M, H]
    out,  # [M, H]
    mine,  # as the rest in `PacketMemory`
    peers,
    sums,
    num_rows,  # M
    WIDTH: tl.constexpr,  # H
    PARTS: tl.constexpr,  # 0 = x is whole
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    program = row * tl.num_programs(0) + tl.program_id(0)
    word = tl.arange(0, _WORDS)
    column = 2 * (tl.program_id(0) * _WORDS + word)[:, None] + tl.arange(0, 2)[None, :]
    inside = column < WIDTH
    at = row * WIDTH + column
    wait_for_inputs(PDL)
    number = tl.load(sums + program) + 1
    if ADD:  # on its way while packets are
        other = tl.load(residual + at, mask=inside, other=0.0)
    if PARTS:
        value = tl.zeros([_WORDS, 2], tl.float32)
        for part in tl.static_range(PARTS):
            own_part = tl.load(x + part * num_rows * WIDTH + at, mask=inside, other=0.0)
            value += own_part.to(tl.float32)
    else:
        value = tl.load(x + at, mask=inside, other=0.0)
    low, high = tl.split(value.to(dtype).to(tl.int16, bitcast=True).to(tl.int32))
    own = (low & 0xFFFF) | (high << 16)
    place = send_words(own, peers, number, program, RANK, RANKS)
    even = tl.zeros([_WORDS], tl.float32)
    odd = even
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            words = own
        else:
            words = words_of(rank, mine, number, place)
        even += _value(words, dtype)
        odd += _value(words >> 16, dtype)
    total = tl.join(even, odd).to(dtype)
    if ADD:
        total = (total.to(tl.float32) + other.to(tl.float32)).to(dtype)
    tl.store(out + at, total, mask=inside)
    tl.store(sums + program, number)


def sum_packets(
    x: Tensor,
    memory: PacketMemory,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    only_compile: bool = False,
) -> Tensor:
    """See `kernels.linear.packets.rank_sums`: `sum_packets` or, with `only_compile`,
    `compile_sum`."""
    num_rows, width = x.shape[-2:]
    assert packets_fit(num_rows, width, dtype) and x.is_contiguous()
    assert x.dtype is dtype or (x.dim() == 3 and x.dtype is torch.float32)
    assert residual is None or (residual.is_contiguous() and residual.shape[-2:] == x.shape[-2:])
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    kernel = _rank_sum_kernel.run(
        x, out if residual is None else residual, out, memory.mine, memory.peers, memory.sums,
        num_rows, WIDTH=width, PARTS=x.shape[0] if x.dim() == 3 else 0, ADD=residual is not None,
        RANK=memory.rank, RANKS=memory.size, num_warps=4, **pdl_options(x),
        grid=(triton.cdiv(width, 2 * WORDS), num_rows), warmup=only_compile,
    )  # fmt: skip
    if only_compile and kernel is not None:  # the interpreter has none
        assert kernel.run is not None  # asking for it loads the kernel onto the GPU
    return out


hash_functions(globals())
