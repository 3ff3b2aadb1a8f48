"""Triton version of `kernels.recurrent.gated_delta`: rows of few tokens.

Their step is in `delta_step`. Rows that states absorb at once are in `delta_chunks`, and what
follows both is in `finish_rows`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions
from ..rows import DeltaRows, DeltaShape, DeltaState, DeltaWeights, OutputGate, StateTable
from .delta_chunks import absorb_bulk
from .delta_step import step_rows
from .finish_rows import finish_rows

_ROWS = 128


@triton.jit(
    do_not_specialize=["num_rows", "num_positions", "num_slots", "out_stride"],
    do_not_specialize_on_alignment=["idx_mapping", "query_start_loc"],
)
def _prepare_rows_kernel(
    table,  # [3, R + 1]
    idx_mapping,  # [N*]
    query_start_loc,  # [N* + 1]
    positions,  # [M*] int64
    out,  # [7, N*], rows `out_stride` apart
    num_rows,
    num_positions,
    num_slots,
    out_stride,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    index = tl.load(idx_mapping + row, mask=inside, other=-1)
    is_real = index >= 0
    slot = tl.where(is_real, index, num_slots - 1)
    first = tl.load(query_start_loc + row, mask=inside, other=0)
    count = tl.load(query_start_loc + row + 1, mask=inside, other=0) - first
    first = tl.minimum(first, num_positions - 1)
    start = tl.load(positions + first, mask=inside & is_real, other=0).to(tl.int32)
    length = tl.load(table + slot, mask=inside & is_real, other=0)
    border = tl.load(table + num_slots + slot, mask=inside & is_real, other=0)
    block = tl.load(table + 2 * num_slots + slot, mask=inside & is_real, other=0)
    lag = tl.minimum(tl.maximum(start - length, 0), LOG)
    tl.store(out + row, length, mask=inside)
    tl.store(out + out_stride + row, border, mask=inside)
    tl.store(out + 2 * out_stride + row, block, mask=inside)
    tl.store(out + 3 * out_stride + row, slot, mask=inside)
    tl.store(out + 4 * out_stride + row, start, mask=inside)
    tl.store(out + 5 * out_stride + row, lag, mask=inside)
    tl.store(out + 6 * out_stride + row, count, mask=inside)
    end = tl.where(count > LOG, start + count, start)
    tl.store(table + slot, end, mask=inside & is_real)


def prepare_rows(
    table: StateTable,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    log: int,
    out: Tensor,
) -> None:
    """See `kernels.recurrent.prepare_rows.prepare_rows`."""
    num_rows = idx_mapping.shape[0]
    _prepare_rows_kernel[(triton.cdiv(num_rows, _ROWS),)](
        table.values,
        idx_mapping,
        query_start_loc,
        positions,
        out,
        num_rows,
        positions.shape[0],
        num_slots=table.values.shape[1],
        out_stride=out.stride(0),
        LOG=log,
        BLOCK=_ROWS,
    )


def gated_delta(
    x: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    state: DeltaState,
    rows: DeltaRows,
    gate: OutputGate | None = None,
) -> Tensor:
    """See `kernels.recurrent.gated_delta.gated_delta`; for a convolution of four taps."""
    assert shape.conv_width == 4 and x.stride(1) == 1
    create = x.new_zeros if gate is None else x.new_empty  # a gate leaves out what is padding
    out = create(x.shape[0], shape.value_size)
    step_rows(x, weights, shape, state, rows, out)
    if not rows.bulk.rows:
        return finish_rows(x, shape, state, rows, out, gate, moves_log=True)
    finish_rows(x, shape, state, rows, out, None, moves_log=True)
    absorb_bulk(x, weights, shape, state, rows, out)
    return out if gate is None else finish_rows(x, shape, state, rows, out, gate, moves_log=False)


hash_functions(globals())
