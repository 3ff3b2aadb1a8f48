"""Triton version of `kernels.linear.embedding`; with it, the first layer can start early (PDL)."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embedding_kernel(
    ids,  # [M]
    table,  # [V, H]
    out,  # [M, H], contiguous
    stride,
    SIZE: tl.constexpr,  # H
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_inputs(PDL)
    source = table + tl.load(ids + row).to(tl.int64) * stride + column
    tl.store(out + row * SIZE + column, tl.load(source, mask=inside, other=0.0), mask=inside)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """See `kernels.linear.embedding.embedding`."""
    assert table.stride(1) == ids.stride(0) == 1
    rows, size = ids.shape[0], table.shape[1]
    out = torch.empty(rows, size, dtype=table.dtype, device=table.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(size))
        _embedding_kernel[(rows, triton.cdiv(size, block))](
            ids,
            table,
            out,
            table.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=4,
            **pdl_options(out),
        )
    return out
