"""Triton versions of `kernels.norm_rope`, and rotary embedding fused with the KV write."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x,  # [A, B, H]
    residual,  # [A * B, H], contiguous
    weight,  # [H]
    out,  # [A * B, H], contiguous
    new_residual,  # [A * B, H], contiguous
    stride_a,
    stride_b,
    num_rows,  # A * B
    inner,  # B
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    source = ((row // inner) * stride_a + (row % inner) * stride_b)[:, None] + column[None, :]
    flat = row[:, None] * SIZE + column[None, :]
    value = tl.load(x + source, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + flat, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(new_residual + flat, value, mask=inside)
    v = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0)
    normed = v * scale[:, None]
    if w.dtype != tl.float32:  # a weight kept exact is applied before rounding
        normed = normed.to(value.dtype).to(tl.float32)
    tl.store(out + flat, (normed * w.to(tl.float32)[None, :]).to(value.dtype), mask=inside)


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    assert x.stride(-1) == 1, "rows must be contiguous"
    rows = x.unsqueeze(0) if x.dim() == 2 else x  # [A, B, H]
    if rows.dim() != 3:
        rows = x.reshape(1, -1, size)
    num_rows = rows.shape[0] * rows.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = out if residual is None else torch.empty_like(out)
    if num_rows:
        block = triton.next_power_of_2(size)
        per_program = max(1, min(16, 2048 // block, triton.next_power_of_2(num_rows)))
        _rms_norm_kernel[(triton.cdiv(num_rows, per_program),)](
            rows,
            out if residual is None else residual.contiguous(),
            weight,
            out,
            new_residual,
            rows.stride(0),
            rows.stride(1),
            num_rows,
            rows.shape[1],
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=per_program,
            ADD=residual is not None,
            num_warps=8 if block >= 4096 else 4,
        )
    return out, new_residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norm_rope.rms_norm`."""
    return _launch_norm(x, None, weight, eps)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.norm_rope.fused_add_rms_norm`; leaves its inputs alone."""
    return _launch_norm(x, residual, weight, eps)


@triton.jit
def _rotary_kernel(
    positions,  # [T] int64
    query,  # [T, Hq, D]
    key,  # [T, Hk, D]
    value,  # [T, Hk, Dv]
    cos_sin,  # [max_position, ROT]
    slot_mapping,  # [T] int64
    query_out,  # [T, Hq, D], contiguous
    key_out,  # [T, Hk, D] or, with STORE, [slots, Hk, D]; contiguous
    value_out,  # with STORE: [slots, Hk, D]
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # query heads, then key heads
    dim = tl.arange(0, BLOCK)
    half: tl.constexpr = ROT // 2
    rotates = dim < ROT
    if INTERLEAVED:
        partner, pair, is_first = dim ^ 1, dim // 2, dim % 2 == 0
    else:
        partner, pair, is_first = (dim + half) % ROT, dim % half, dim < half
    row = cos_sin + tl.load(positions + token) * ROT
    cos = tl.load(row + pair, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(row + half + pair, mask=rotates, other=0.0).to(tl.float32)
    sin = tl.where(is_first, -sin, sin)
    partner = tl.where(rotates, partner, dim)

    is_query = (head < Q_HEADS)[:, None]
    k_head = head - Q_HEADS
    is_key = (k_head >= 0)[:, None] & (k_head < K_HEADS)[:, None]
    inside = (dim < HEAD_DIM)[None, :]
    base = query + token * q_stride_t + head[:, None] * q_stride_h
    x = tl.load(base + dim[None, :], mask=is_query & inside, other=0.0)
    swapped = tl.load(base + partner[None, :], mask=is_query & inside, other=0.0)
    rotated = x.to(tl.float32) * cos[None, :] + swapped.to(tl.float32) * sin[None, :]
    target = query_out + (token * Q_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(target, rotated.to(x.dtype), mask=is_query & inside)
    if K_HEADS > 0:
        base = key + token * k_stride_t + k_head[:, None] * k_stride_h
        x = tl.load(base + dim[None, :], mask=is_key & inside, other=0.0)
        swapped = tl.load(base + partner[None, :], mask=is_key & inside, other=0.0)
        rotated = x.to(tl.float32) * cos[None, :] + swapped.to(tl.float32) * sin[None, :]
        destination = token
        if STORE:
            destination = tl.load(slot_mapping + token)
        writes = is_key & inside & (destination >= 0)
        target = (destination * K_HEADS + k_head[:, None]) * HEAD_DIM + dim[None, :]
        tl.store(key_out + target, rotated.to(x.dtype), mask=writes)
        if STORE:
            base = value + token * v_stride_t + k_head[:, None] * v_stride_h
            x = tl.load(base + dim[None, :], mask=is_key & inside, other=0.0)
            tl.store(value_out + target, x, mask=writes)


def _launch_rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cos_sin_cache: Tensor,
    interleaved: bool,
    kv_cache: Tensor | None,
    slot_mapping: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    num_tokens, q_heads, head_dim = query.shape
    k_heads = 0 if key is None else key.shape[1]
    assert query.stride(-1) == 1 and cos_sin_cache.is_contiguous()
    assert key is None or key.stride(-1) == 1
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out: Tensor | None
    if kv_cache is None:
        key_out = (
            None if key is None else torch.empty_like(key, memory_format=torch.contiguous_format)
        )
        k_target = v_target = rotated if key_out is None else key_out
    else:
        key_out, k_target, v_target = None, kv_cache[0], kv_cache[1]
    keys = query if key is None else key
    values = keys if value is None else value
    if num_tokens:
        block = triton.next_power_of_2(head_dim)
        heads = max(1, min(triton.next_power_of_2(q_heads + k_heads), 1024 // block))
        _rotary_kernel[(num_tokens, triton.cdiv(q_heads + k_heads, heads))](
            positions,
            query,
            keys,
            values,
            cos_sin_cache,
            positions if slot_mapping is None else slot_mapping,
            rotated,
            k_target,
            v_target,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            HEAD_DIM=head_dim,
            ROT=cos_sin_cache.shape[1],
            INTERLEAVED=interleaved,
            STORE=kv_cache is not None,
            HEADS=heads,
            BLOCK=block,
        )
    return rotated, key_out


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.norm_rope.rotary_embedding`."""
    return _launch_rotary(positions, query, key, None, cos_sin_cache, interleaved, None, None)


def rotary_store_kv(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """See `kernels.rotary_store_kv.rotary_store_kv`."""
    assert kv_cache.is_contiguous() and value.stride(-1) == 1
    return _launch_rotary(
        positions, query, key, value, cos_sin_cache, interleaved, kv_cache, slot_mapping
    )[0]
