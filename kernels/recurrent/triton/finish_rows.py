"""What follows the gated delta rule in one launch: the logs move on, and outputs are gated."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..rows import DeltaRows, DeltaShape, DeltaState, OutputGate
from .delta_parts import row_fields

_CHANNELS = 512


@triton.jit
def _move_log(
    x,  # [M*, channels]
    history,  # [R + 1, 3 + LOG, channels]
    snapshot_tails,  # [B, 3, channels]
    rows,  # [7, N*]
    query_start_loc,  # [N* + 1]
    x_stride,
    rows_stride,
    num_slots,
    row,
    block_of_channels,
    LOG: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,  # at least LOG
    PDL: tl.constexpr,
):
    """Move each history on: the inputs before the row's first token, then the row's own.

    Without a log, the inputs before the token after the row. Nothing that is read here is written
    by the kernel before, so that all of it is loaded before the wait. Padded rows are masked, not
    skipped: behind a branch, the compiler would load the row's fields one after another.
    """
    length, border, block, slot, start, lag, count = row_fields(rows, rows_stride, row)
    token = tl.load(query_start_loc + row).to(tl.int64)
    limit: tl.constexpr = LOG if LOG > 0 else 1
    count = tl.where(count > limit, 0, count)
    is_real = slot < num_slots - 1
    at, first = tl.arange(0, BLOCK), block_of_channels * BLOCK
    inside = ((at < CHANNELS - first) & is_real)[None, :]
    tap = tl.arange(0, 4)[:, None]
    moved, place = inside & (tap < 3), tap * CHANNELS + at[None, :]
    past = history + slot * ((3 + LOG) * CHANNELS) + first
    saved = snapshot_tails + block * (3 * CHANNELS) + first
    now = x + token * x_stride + first
    if LOG > 0:
        tail = tl.load(past + lag * CHANNELS + place, mask=moved & (start + tap >= 3), other=0.0)
        hit = border - length  # logged tokens before the border
        saves = moved & (hit > 0) & (hit <= lag) & (block > 0)
        source = tl.where((hit > 0) & (hit <= lag), hit, 0)
        kept = saves & (border + tap >= 3)
        before = tl.load(past + source * CHANNELS + place, mask=kept, other=0.0)
        t = tl.arange(0, TOKENS)[:, None]
        logged = inside & (t < count)
        own = tl.load(now + t * x_stride + at[None, :], mask=logged, other=0.0)
        wait_for_inputs(PDL)  # for those that read the log
        tl.debug_barrier()  # all threads have read before the first writes
        tl.store(saved + place, before, mask=saves)
        tl.store(past + place, tail, mask=moved)
        tl.store(past + (3 + t) * CHANNELS + at[None, :], own, mask=logged)
    else:
        kept = moved & (tap + count < 3) & (start + count + tap >= 3)
        tail = tl.load(past + count * CHANNELS + place, mask=kept, other=0.0)
        is_own = moved & (tap + count == 3)  # the row's token, the last of the three
        own = tl.load(now + (tap * 0 + at[None, :]), mask=is_own, other=0.0)
        tail = tl.where(is_own, own, tail)
        wait_for_inputs(PDL)
        tl.debug_barrier()
        tl.store(past + place, tail, mask=moved)
        saves = moved & (count > 0) & (start + count == border) & (block > 0)
        tl.store(saved + place, tail, mask=saves)


@triton.jit
def _gate_heads(
    out,  # [M*, HV * DV]
    gate,  # [M*, HV * DV], rows `gate_stride` apart
    gain,  # [DV]
    gated,  # [M*, HV * DV], contiguous
    token,
    num_tokens,  # that exist; others are padding
    gate_stride,
    eps,
    first_head,
    HV: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """See `kernels.recurrent.gated_norm`, for some heads of a token. Padding becomes 0."""
    head = first_head + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = (head < HV)[:, None] & (at < DV)[None, :]
    place = head[:, None] * DV + at[None, :]
    weight = tl.load(gain + at, mask=at < DV, other=0.0).to(tl.float32)
    exists = inside & (token < num_tokens)
    z = tl.load(gate + token * gate_stride + place, mask=exists, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    own = tl.load(out + token * (HV * DV) + place, mask=exists, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, 1) / DV + eps)
    own = own * scale[:, None] * weight[None, :] * z * tl.sigmoid(z)
    target = gated + token * (HV * DV) + place
    tl.store(target, own.to(gated.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["rows_stride", "num_slots", "num_rows", "log_programs"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _finish_rows_kernel(
    x,  # [M*, channels]
    history,
    snapshot_tails,
    rows,
    query_start_loc,
    out,  # the arguments of `_gate_heads`
    gate,
    gain,
    gated,
    x_stride,
    rows_stride,
    num_slots,
    num_rows,  # N*
    log_programs,
    gate_stride,
    eps,
    LOG: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of channels
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """What follows `_step_kernel`: some programs move the logs on, the others gate the outputs."""
    program = tl.program_id(0)
    if program < log_programs:
        _move_log(
            x, history, snapshot_tails, rows, query_start_loc, x_stride, rows_stride, num_slots,
            program // BLOCKS, program % BLOCKS, LOG, CHANNELS, BLOCK, TOKENS, PDL,
        )  # fmt: skip
    else:
        part = program - log_programs
        groups: tl.constexpr = (HV + HEADS - 1) // HEADS
        token = (part // groups).to(tl.int64)
        _gate_heads(
            out, gate, gain, gated, token, tl.load(query_start_loc + num_rows), gate_stride, eps,
            part % groups * HEADS, HV, DV, HEADS, BLOCK_V, PDL,
        )  # fmt: skip


def finish_rows(
    x: Tensor,
    shape: DeltaShape,
    state: DeltaState,
    rows: DeltaRows,
    out: Tensor,
    gate: OutputGate | None,
    moves_log: bool,
) -> Tensor:
    """Move the logs on, if they have not been yet, and gate the outputs if `gate` is given."""
    num_rows, heads = rows.values.shape[1], shape.num_value_heads
    blocks = triton.cdiv(shape.channels, _CHANNELS)
    block_v = triton.next_power_of_2(shape.value_dim)
    per_program = max(1, min(triton.next_power_of_2(heads), 1024 // block_v))
    log_programs, gate_programs, gated = num_rows * blocks if moves_log else 0, 0, out
    if gate is not None:
        gate_programs = x.shape[0] * triton.cdiv(heads, per_program)
        gated = torch.empty_like(out)
        assert gate.values.stride(1) == 1
    if log_programs + gate_programs:
        _finish_rows_kernel[(log_programs + gate_programs,)](
            x,
            state.history,
            state.snapshot_tails,
            rows.values,
            rows.query_start_loc,
            out,
            out if gate is None else gate.values,
            out if gate is None else gate.weight,
            gated,
            x.stride(0),
            rows.values.stride(0),
            state.state.shape[0],
            num_rows,
            log_programs,
            0 if gate is None else gate.values.stride(0),
            0.0 if gate is None else gate.eps,
            LOG=rows.log,
            CHANNELS=shape.channels,
            BLOCKS=blocks,
            BLOCK=_CHANNELS,
            TOKENS=triton.next_power_of_2(max(1, rows.log)),
            HV=heads,
            DV=shape.value_dim,
            HEADS=per_program,
            BLOCK_V=block_v,
            num_warps=4,
            **pdl_options(x),
        )
    return gated


hash_functions(globals())
