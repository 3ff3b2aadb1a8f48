"""Triton version of `kernels.attention.compressed.pages.list_slots`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions, pdl_options, wait_for_inputs
from ..pages import Pages, SlotList, TokenRows

_BLOCK = 512


@triton.jit(
    do_not_specialize=["width", "columns", "table_stride"],
    do_not_specialize_on_alignment=["positions", "requests", "block_table"],
)
def _list_slots_kernel(
    positions,  # [M] int64
    requests,  # [M] int64
    block_table,  # [N, columns] int32
    chosen,  # [M, S] int64
    slots,  # [M, S] int32
    counts,  # [M] int32
    width,  # S
    columns,
    table_stride,
    BLOCK_SIZE: tl.constexpr,  # tokens of a block
    ENTRY: tl.constexpr,  # tokens of an entry
    NEWEST: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part of its list)."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    each = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + token).to(tl.int32)
    request = tl.load(requests + token)
    count = tl.minimum((position + 1) // ENTRY, width)
    listed = each < count
    entry = each
    if NEWEST:
        entry += tl.maximum((position + 1) // ENTRY - width, 0)
    if CHOSEN:
        entry = tl.load(chosen + token * width + each, mask=listed, other=0).to(tl.int32)
    at = entry * ENTRY
    column = tl.minimum(at // BLOCK_SIZE, columns - 1)
    block = tl.load(block_table + request * table_stride + column, mask=listed, other=0)
    slot = block * (BLOCK_SIZE // ENTRY) + at % BLOCK_SIZE // ENTRY
    tl.store(slots + token * width + each, tl.where(listed, slot, -1), mask=each < width)
    if tl.program_id(1) == 0:
        tl.store(counts + token, count)


def list_slots(
    pages: Pages,
    tokens: TokenRows,
    width: int,
    newest: bool = False,
    chosen: Tensor | None = None,
) -> SlotList:
    """See `kernels.attention.compressed.pages.list_slots`."""
    positions, requests, table = tokens.positions, tokens.requests, pages.block_table
    rows = positions.shape[0]
    assert positions.stride(0) == requests.stride(0) == table.stride(1) == 1
    assert chosen is None or chosen.is_contiguous()
    slots = torch.empty(rows, width, dtype=torch.int32, device=positions.device)
    counts = torch.empty(rows, dtype=torch.int32, device=positions.device)
    if rows:
        _list_slots_kernel[(rows, max(1, triton.cdiv(width, _BLOCK)))](
            positions, requests, table, slots if chosen is None else chosen, slots, counts,
            width, table.shape[1], table.stride(0),
            BLOCK_SIZE=pages.block_size, ENTRY=pages.entry_tokens, NEWEST=newest,
            CHOSEN=chosen is not None, BLOCK=_BLOCK, num_warps=4, **pdl_options(positions),
        )  # fmt: skip
    return SlotList(slots, counts)


hash_functions(globals())
