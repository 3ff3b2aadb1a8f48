"""The gated delta rule over long rows, in chunks of 64 tokens; see `gated_delta.delta_chunks`.

Three kernels, after logged tokens have been absorbed: the convolution of all tokens; for each chunk
the inverse of its triangular system, times its values and keys; and the pass of the states through
a row's chunks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions
from ..rows import CHUNK, DeltaRows, DeltaShape, DeltaState, DeltaWeights
from .delta_parts import conv_weights, log_decay

_CHANNELS = 256


@triton.jit(do_not_specialize=["rows_stride"])
def _mix_kernel(
    x,  # [M*, channels]
    mixed,  # [M*, conv channels]
    conv,  # [conv channels, 4]
    history,  # [R + 1, 3 + LOG, channels]
    rows,  # [7, N*]
    chunks,  # [C, 4]: batch row, the row's first token, tokens before the chunk, its tokens
    conv_stride,
    tap_stride,
    x_stride,
    rows_stride,
    LOG: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve the inputs of a chunk's tokens in one head, and norm them if queries or keys."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(chunks + 4 * chunk)
    first = tl.load(chunks + 4 * chunk + 1).to(tl.int64)
    before = tl.load(chunks + 4 * chunk + 2)
    count = tl.load(chunks + 4 * chunk + 3)
    slot = tl.load(rows + 3 * rows_stride + row).to(tl.int64)
    start = tl.load(rows + 4 * rows_stride + row)
    channels: tl.constexpr = 2 * HK * DK + HV * DV + 2 * HV
    conv_channels: tl.constexpr = 2 * HK * DK + HV * DV
    is_value = head >= 2 * HK
    at = tl.arange(0, BLOCK)
    base = tl.where(is_value, 2 * HK * DK + (head - 2 * HK) * DV, head * DK)
    inside = at < tl.where(is_value, DV, DK)
    channel = base + at
    w0, w1, w2, w3 = conv_weights(conv, conv_stride, tap_stride, base, at, inside)
    token = before + tl.arange(0, CHUNK)  # in the row
    exists = tl.arange(0, CHUNK) < count
    total = tl.zeros((CHUNK, BLOCK), tl.float32)
    for i in tl.static_range(4):
        w = w0 if i == 0 else (w1 if i == 1 else (w2 if i == 2 else w3))
        source = token - 3 + i
        own = exists & (source >= 0)
        earlier = exists & (source < 0) & (start + source >= 0)
        tap = tl.load(
            x + (first + source)[:, None] * x_stride + channel[None, :],
            mask=own[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        tap += tl.load(
            history + (slot * (3 + LOG) + 3 + source)[:, None] * channels + channel[None, :],
            mask=earlier[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tap * w[None, :]
    total = total * tl.sigmoid(total)
    scale = tl.rsqrt(tl.sum(total * total, 1) + 1e-6)
    scale = tl.where(head < HK, scale * DK**-0.5, scale)
    total = tl.where(is_value, total, total * scale[:, None])
    target = mixed + (first + token)[:, None] * conv_channels + channel[None, :]
    total = total.to(mixed.dtype.element_ty)
    tl.store(target, total, mask=exists[:, None] & inside[None, :])


@triton.jit
def _solve_kernel(
    x,  # [M*, channels], of which b and a are read
    mixed,  # [M*, conv channels]
    decay_rate,  # [Hv]
    dt_bias,  # [Hv]
    chunks,  # [C, 4]
    decays,  # [M*, Hv] float32, out: sums of log decays within the chunk
    keys,  # [M*, Hv, Dk], out: the system's inverse times beta exp(sum) k
    values,  # [M*, Hv, Dv], out: the system's inverse times beta v
    x_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 4 * chunk + 1) + tl.load(chunks + 4 * chunk + 2)
    count = tl.load(chunks + 4 * chunk + 3)
    conv_channels: tl.constexpr = 2 * HK * DK + HV * DV
    i = tl.arange(0, CHUNK)
    exists = i < count
    token = (first + i).to(tl.int64)
    inputs = x + token * x_stride + conv_channels + head
    b = tl.load(inputs, mask=exists, other=0.0).to(tl.float32)
    a = tl.load(inputs + HV, mask=exists, other=0.0).to(tl.float32)
    decay = log_decay(a, tl.load(decay_rate + head), tl.load(dt_bias + head))
    beta = tl.where(exists, tl.sigmoid(b), 0.0)
    total = tl.cumsum(tl.where(exists, decay, 0.0), 0)
    tl.store(decays + token * HV + head, total, mask=exists)
    k_at, v_at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_k = exists[:, None] & (k_at < DK)[None, :]
    k_head = head // (HV // HK)
    source = mixed + token[:, None] * conv_channels
    key = tl.load(source + HK * DK + k_head * DK + k_at[None, :], mask=in_k, other=0.0)
    lower = i[:, None] > i[None, :]
    between = tl.where(lower, total[:, None] - total[None, :], float("-inf"))
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * tl.exp(between)
    # Row by row: inverse[r] = -system[r] - sum over j < r of system[r, j] inverse[j].
    inverse = -system * beta[:, None]
    for r in range(1, count):
        own = tl.sum(tl.where(i[:, None] == r, inverse, 0.0), 0)
        own += tl.sum(own[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == r, own[None, :], inverse)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    scaled = key.to(tl.float32) * (beta * tl.exp(total))[:, None]
    result = tl.dot(inverse, scaled, input_precision=PRECISION)
    target = keys + (token[:, None] * HV + head) * DK + k_at[None, :]
    tl.store(target, result.to(keys.dtype.element_ty), mask=in_k)
    in_v = exists[:, None] & (v_at < DV)[None, :]
    value = tl.load(source + 2 * HK * DK + head * DV + v_at[None, :], mask=in_v, other=0.0)
    scaled = value.to(tl.float32) * beta[:, None]
    result = tl.dot(inverse, scaled, input_precision=PRECISION)
    target = values + (token[:, None] * HV + head) * DV + v_at[None, :]
    tl.store(target, result.to(values.dtype.element_ty), mask=in_v)


@triton.jit(do_not_specialize=["rows_stride", "num_slots"])
def _scan_kernel(
    mixed,  # [M*, conv channels]
    decays,  # [M*, Hv] float32
    keys,  # [M*, Hv, Dk]
    values,  # [M*, Hv, Dv]
    out,  # [M*, Hv * Dv]
    state,  # [R + 1, Hv, Dk, Dv]
    snapshots,  # [B, Hv, Dk, Dv]
    rows,  # [7, N*]
    bulk,  # [B, 3]: batch row, first token, tokens
    rows_stride,
    out_stride,
    num_slots,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    index, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(bulk + 3 * index)
    first = tl.load(bulk + 3 * index + 1).to(tl.int64)
    count = tl.load(bulk + 3 * index + 2)
    border = tl.load(rows + rows_stride + row)
    block = tl.load(rows + 2 * rows_stride + row).to(tl.int64)
    slot = tl.load(rows + 3 * rows_stride + row).to(tl.int64)
    start = tl.load(rows + 4 * rows_stride + row)
    conv_channels: tl.constexpr = 2 * HK * DK + HV * DV
    k_at, v_at = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (head * DK + k_at[:, None]) * DV + v_at[None, :]
    in_tile = (k_at < DK)[:, None] & (v_at < DV)[None, :]
    own = state + slot * HV * DK * DV + tile
    current = tl.load(own, mask=in_tile & (start > 0), other=0.0)
    i = tl.arange(0, CHUNK)
    k_head = head // (HV // HK)
    for before in range(0, count, CHUNK):
        exists = before + i < count
        token = first + before + i
        in_k = exists[:, None] & (k_at < DK)[None, :]
        in_v = exists[:, None] & (v_at < DV)[None, :]
        source = mixed + token[:, None] * conv_channels + k_head * DK + k_at[None, :]
        query = tl.load(source, mask=in_k, other=0.0)
        key = tl.load(source + HK * DK, mask=in_k, other=0.0)
        solved = tl.load(
            keys + (token[:, None] * HV + head) * DK + k_at[None, :], mask=in_k, other=0.0
        )
        change = tl.load(
            values + (token[:, None] * HV + head) * DV + v_at[None, :], mask=in_v, other=0.0
        ).to(tl.float32)
        last = first + tl.minimum(before + CHUNK, count) - 1
        final = tl.load(decays + last * HV + head)
        total = tl.load(decays + token * HV + head, mask=exists, other=0.0)
        change -= tl.dot(solved.to(tl.float32), current, input_precision=PRECISION)
        lower = exists[:, None] & (i[:, None] >= i[None, :])
        reach = tl.where(lower, total[:, None] - total[None, :], float("-inf"))
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * tl.exp(reach)
        result = tl.dot(scores, change, input_precision=PRECISION)
        carried = tl.dot(query.to(tl.float32), current, input_precision=PRECISION)
        result += carried * tl.exp(total)[:, None]
        target = out + token[:, None] * out_stride + head * DV + v_at[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=in_v)
        left = key.to(tl.float32) * tl.where(exists, tl.exp(final - total), 0.0)[:, None]
        current = current * tl.exp(final)
        current += tl.dot(tl.trans(left), change, input_precision=PRECISION)
    if slot < num_slots - 1:
        tl.store(own, current, mask=in_tile)
        if (start + count == border) & (block > 0):
            tl.store(snapshots + block * HV * DK * DV + tile, current, mask=in_tile)


@triton.jit(do_not_specialize=["rows_stride", "num_slots"])
def _tail_kernel(
    x,  # [M*, channels]
    history,  # [R + 1, 3 + LOG, channels]
    snapshot_tails,  # [B, 3, channels]
    rows,  # [7, N*]
    bulk,  # [B, 3]
    x_stride,
    rows_stride,
    num_slots,
    LOG: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the inputs of the last three tokens of each bulk row, two or more."""
    index = tl.program_id(0)
    row = tl.load(bulk + 3 * index)
    first = tl.load(bulk + 3 * index + 1).to(tl.int64)
    count = tl.load(bulk + 3 * index + 2)
    border = tl.load(rows + rows_stride + row)
    block = tl.load(rows + 2 * rows_stride + row).to(tl.int64)
    slot = tl.load(rows + 3 * rows_stride + row).to(tl.int64)
    start = tl.load(rows + 4 * rows_stride + row)
    if slot < num_slots - 1:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        past = history + slot * (3 + LOG) * CHANNELS + channel
        now = x + (first + count) * x_stride + channel  # after the last token
        tail0 = tl.load(now - 3 * x_stride, mask=inside & (count >= 3), other=0.0)
        tail0 += tl.load(past + 2 * CHANNELS, mask=inside & (count == 2) & (start > 0), other=0.0)
        tail1 = tl.load(now - 2 * x_stride, mask=inside, other=0.0)
        tail2 = tl.load(now - x_stride, mask=inside, other=0.0)
        tl.debug_barrier()  # one of these is overwritten below, perhaps by another thread
        tl.store(past, tail0, mask=inside)
        tl.store(past + CHANNELS, tail1, mask=inside)
        tl.store(past + 2 * CHANNELS, tail2, mask=inside)
        if (start + count == border) & (block > 0):
            saved = snapshot_tails + block * 3 * CHANNELS + channel
            tl.store(saved, tail0, mask=inside)
            tl.store(saved + CHANNELS, tail1, mask=inside)
            tl.store(saved + 2 * CHANNELS, tail2, mask=inside)


def absorb_bulk(
    x: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    state: DeltaState,
    rows: DeltaRows,
    out: Tensor,  # [M*, value size]
) -> None:
    """Process the bulk rows of a step, whose logged tokens have been absorbed already."""
    chunks, bulk = rows.bulk.chunk_table, rows.bulk.row_table
    assert chunks is not None and bulk is not None
    tokens, heads = x.shape[0], shape.num_value_heads
    sizes = {
        "HK": shape.num_key_heads, "HV": heads, "DK": shape.key_dim, "DV": shape.value_dim,
        "CHUNK": CHUNK,
    }  # fmt: skip
    block_k = max(16, triton.next_power_of_2(shape.key_dim))
    block_v = max(16, triton.next_power_of_2(shape.value_dim))
    precision = "ieee" if x.dtype is torch.float32 else "tf32"
    mixed = x.new_empty(tokens, shape.conv_channels)
    decays = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    keys = x.new_empty(tokens, heads, shape.key_dim)
    values = x.new_empty(tokens, heads, shape.value_dim)
    stride, num_slots = rows.values.stride(0), state.state.shape[0]
    _mix_kernel[(chunks.shape[0], 2 * shape.num_key_heads + heads)](
        x, mixed, weights.conv, state.history, rows.values, chunks, *weights.conv.stride(),
        x.stride(0), stride, LOG=rows.log, BLOCK=max(block_k, block_v), **sizes,
    )  # fmt: skip
    _solve_kernel[(chunks.shape[0], heads)](
        x, mixed, weights.decay_rate, weights.dt_bias, chunks, decays, keys, values, x.stride(0),
        BLOCK_K=block_k, BLOCK_V=block_v, PRECISION=precision, **sizes,
    )  # fmt: skip
    tile = min(block_v, 32)
    _scan_kernel[(bulk.shape[0], heads, triton.cdiv(shape.value_dim, tile))](
        mixed, decays, keys, values, out, state.state, state.snapshots, rows.values, bulk,
        stride, out.stride(0),
        num_slots=num_slots, BLOCK_K=block_k, BLOCK_V=tile, PRECISION=precision, **sizes,
        num_stages=2,  # more would not fit the shared memory of smaller GPUs
    )  # fmt: skip
    _tail_kernel[(bulk.shape[0], triton.cdiv(shape.channels, _CHANNELS))](
        x, state.history, state.snapshot_tails, rows.values, bulk, x.stride(0), stride,
        num_slots=num_slots, LOG=rows.log, CHANNELS=shape.channels, BLOCK=_CHANNELS,
    )  # fmt: skip


hash_functions(globals())
