"""Triton versions of `kernels.drafts.prepare_draft`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...launch import pdl_options, wait_for_inputs

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(
    positions,
    seq_lens,
    write_positions,
    num_rows,
    max_model_len,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    length = tl.load(seq_lens + row, mask=inside, other=0)
    live = length > 0
    step = live.to(tl.int32)
    position = tl.load(positions + row, mask=inside, other=0) + step
    if WRITES:
        known = live & (position < max_model_len)
        tl.store(write_positions + row, tl.where(known, position, -1), mask=inside)
    tl.store(positions + row, tl.minimum(position, max_model_len - 1), mask=inside)
    tl.store(seq_lens + row, tl.minimum(length + step, max_model_len), mask=inside)


def advance_draft_decode(
    positions: Tensor,
    seq_lens: Tensor,
    max_model_len: int,
    out_write_positions: Tensor | None = None,
) -> None:
    """See `kernels.drafts.prepare_draft.advance_draft_decode`."""
    rows = positions.shape[0]
    _advance_kernel[(triton.cdiv(rows, _BLOCK),)](
        positions,
        seq_lens,
        positions if out_write_positions is None else out_write_positions,
        rows,
        max_model_len,
        WRITES=out_write_positions is not None,
        BLOCK=_BLOCK,
        **pdl_options(positions),
    )


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["out"],
)
def _draft_slots_kernel(
    table,  # [>= N*, width] int32, rows are batch rows
    seq_lens,
    write_positions,
    out,  # [>= N*] int64
    table_stride,
    width,
    block_size,
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    position = tl.load(write_positions + row, mask=inside, other=-1)
    writes = (position >= 0) & (tl.load(seq_lens + row, mask=inside, other=0) > 0)
    column = position // block_size
    writes &= column < width
    block = tl.load(table + row.to(tl.int64) * table_stride + column, mask=writes, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(out + row, tl.where(block > 0, slot, -1), mask=inside)


def map_draft_slots(
    block_tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    seq_lens: Tensor,
    write_positions: Tensor,
    out: Tensor,
) -> None:
    """See `kernels.drafts.prepare_draft.map_draft_slots`."""
    rows = write_positions.shape[0]
    for group, (table, size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        _draft_slots_kernel[(triton.cdiv(rows, _BLOCK),)](
            table,
            seq_lens,
            write_positions,
            out[group],
            table.stride(0),
            table.shape[1],
            size,
            rows,
            BLOCK=_BLOCK,
            **pdl_options(table),
        )
