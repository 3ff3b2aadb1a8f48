"""Triton version of `kernels.recurrent.gated_delta`: rows of few tokens.

Rows that states absorb at once are in `delta_chunks`, and what follows both is in `finish_rows`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..rows import DeltaRows, DeltaShape, DeltaState, DeltaWeights, OutputGate, StateTable
from .delta_chunks import absorb_bulk
from .delta_parts import conv_weights, convolved, gates, normed, row_fields
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


@triton.jit
def _advanced(state, query, key, value, decay, beta):
    """One token: a state tile [K, V] -> (state, output [V])."""
    state = state * tl.exp(decay)
    change = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * change[None, :]
    return state, tl.sum(state * query[:, None], 0)


@triton.jit(
    do_not_specialize=["rows_stride", "num_slots"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _step_kernel(
    x,  # [M*, channels]
    out,  # [M*, Hv * Dv]
    conv,  # [conv channels, 4]
    decay_rate,  # [Hv]
    dt_bias,  # [Hv]
    state,  # [R + 1, Hv, Dk, Dv]
    history,  # [R + 1, 3 + LOG, channels]
    snapshots,  # [B, Hv, Dk, Dv]
    rows,  # [7, N*]
    query_start_loc,  # [N* + 1]
    x_stride,
    rows_stride,
    out_stride,
    num_slots,
    LOG: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tokens of a row in one head. States and logs are of earlier steps, so that logged tokens
    are absorbed before the kernel waits for x."""
    row, head = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV
    length, border, block, slot, start, lag, count = row_fields(rows, rows_stride, row)
    limit: tl.constexpr = LOG if LOG > 0 else 1
    count = tl.where(count > limit, 0, count)
    is_real = slot < num_slots - 1
    if lag + count > 0:
        k_at, v_at = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_k, in_v = k_at < DK, v_at < DV
        q_channel = (head // (HV // HK)) * DK + k_at
        k_channel = HK * DK + q_channel
        v_channel = 2 * HK * DK + head * DV + v_at
        b_channel = 2 * HK * DK + HV * DV + head
        tile = (head * DK + k_at[:, None]) * DV + v_at[None, :]
        in_tile = in_k[:, None] & in_v[None, :]
        current = tl.load(
            state + slot * HV * DK * DV + tile, mask=in_tile & (length > 0), other=0.0
        )
        q_w0, q_w1, q_w2, q_w3 = conv_weights(conv, q_channel, in_k)
        k_w0, k_w1, k_w2, k_w3 = conv_weights(conv, k_channel, in_k)
        v_w0, v_w1, v_w2, v_w3 = conv_weights(conv, v_channel, in_v)
        rate, bias = tl.load(decay_rate + head), tl.load(dt_bias + head)
        past = history + slot * (3 + LOG) * channels
        # The inputs of the three tokens before; a sequence begins with zeros.
        known0, known1, known2 = length >= 3, length >= 2, length >= 1
        q0 = tl.load(past + q_channel, mask=in_k & known0, other=0.0).to(tl.float32)
        k0 = tl.load(past + k_channel, mask=in_k & known0, other=0.0).to(tl.float32)
        v0 = tl.load(past + v_channel, mask=in_v & known0, other=0.0).to(tl.float32)
        past += channels
        q1 = tl.load(past + q_channel, mask=in_k & known1, other=0.0).to(tl.float32)
        k1 = tl.load(past + k_channel, mask=in_k & known1, other=0.0).to(tl.float32)
        v1 = tl.load(past + v_channel, mask=in_v & known1, other=0.0).to(tl.float32)
        past += channels
        q2 = tl.load(past + q_channel, mask=in_k & known2, other=0.0).to(tl.float32)
        k2 = tl.load(past + k_channel, mask=in_k & known2, other=0.0).to(tl.float32)
        v2 = tl.load(past + v_channel, mask=in_v & known2, other=0.0).to(tl.float32)
        for t in range(lag):
            past += channels
            q3 = tl.load(past + q_channel, mask=in_k, other=0.0).to(tl.float32)
            k3 = tl.load(past + k_channel, mask=in_k, other=0.0).to(tl.float32)
            v3 = tl.load(past + v_channel, mask=in_v, other=0.0).to(tl.float32)
            decay, beta = gates(past, b_channel, HV, rate, bias)
            key = normed(convolved(k0, k1, k2, k3, k_w0, k_w1, k_w2, k_w3))
            value = convolved(v0, v1, v2, v3, v_w0, v_w1, v_w2, v_w3)
            current, _ = _advanced(current, key, key, value, decay, beta)
            if (length + t + 1 == border) & (block > 0) & is_real:
                tl.store(snapshots + block * HV * DK * DV + tile, current, mask=in_tile)
            q0, q1, q2 = q1, q2, q3
            k0, k1, k2 = k1, k2, k3
            v0, v1, v2 = v1, v2, v3
        if (lag > 0) & is_real:
            tl.store(state + slot * HV * DK * DV + tile, current, mask=in_tile)
        token = tl.load(query_start_loc + row).to(tl.int64)
        wait_for_inputs(PDL)
        now = x + token * x_stride
        target = out + token * out_stride + head * DV + v_at
        for _ in range(count):
            q3 = tl.load(now + q_channel, mask=in_k, other=0.0).to(tl.float32)
            k3 = tl.load(now + k_channel, mask=in_k, other=0.0).to(tl.float32)
            v3 = tl.load(now + v_channel, mask=in_v, other=0.0).to(tl.float32)
            decay, beta = gates(now, b_channel, HV, rate, bias)
            query = normed(convolved(q0, q1, q2, q3, q_w0, q_w1, q_w2, q_w3))
            key = normed(convolved(k0, k1, k2, k3, k_w0, k_w1, k_w2, k_w3))
            value = convolved(v0, v1, v2, v3, v_w0, v_w1, v_w2, v_w3)
            current, result = _advanced(current, query * DK**-0.5, key, value, decay, beta)
            tl.store(target, result.to(out.dtype.element_ty), mask=in_v)
            now += x_stride
            target += out_stride
            q0, q1, q2 = q1, q2, q3
            k0, k1, k2 = k1, k2, k3
            v0, v1, v2 = v1, v2, v3
        if LOG == 0:
            if (count > 0) & is_real:
                tl.store(state + slot * HV * DK * DV + tile, current, mask=in_tile)
                if (start + count == border) & (block > 0):
                    tl.store(snapshots + block * HV * DK * DV + tile, current, mask=in_tile)
    else:
        wait_for_inputs(PDL)


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
    num_rows, num_slots = rows.values.shape[1], state.state.shape[0]
    block_v = min(32, triton.next_power_of_2(shape.value_dim))
    grid = (num_rows, shape.num_value_heads, triton.cdiv(shape.value_dim, block_v))
    _step_kernel[grid](
        x,
        out,
        weights.conv,
        weights.decay_rate,
        weights.dt_bias,
        state.state,
        state.history,
        state.snapshots,
        rows.values,
        rows.query_start_loc,
        x.stride(0),
        rows.values.stride(0),
        out.stride(0),
        num_slots=num_slots,
        LOG=rows.log,
        HK=shape.num_key_heads,
        HV=shape.num_value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=block_v,
        num_warps=4,
        **pdl_options(x),
    )
    if not rows.bulk.rows:
        return finish_rows(x, shape, state, rows, out, gate, moves_log=True)
    finish_rows(x, shape, state, rows, out, None, moves_log=True)
    absorb_bulk(x, weights, shape, state, rows, out)
    return out if gate is None else finish_rows(x, shape, state, rows, out, gate, moves_log=False)


hash_functions(globals())
