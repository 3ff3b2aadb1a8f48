"""Triton versions of `kernels.linear.norm_rope`, and of rotary embedding with the KV write."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...quant.triton.e4m3 import to_cache
from ..rotation import Rotation
from .rotation import load_parts, pairs, rotate_halves, turns_halves

# The heads and warps of a program that rotates whole heads, see `rotate_halves`. None = another
# kernel rotates these, too.
HALVES: tuple[int, int] | None = (16, 4)


@triton.jit(do_not_specialize=["num_rows", "inner"], do_not_specialize_on_alignment=["rows"])
def _rms_norm_kernel(
    x,  # [A, B, H]; PARTS: [PARTS, A * B, H], contiguous, float32
    residual,  # [A * B, H]; SELECT: more rows
    rows,  # [A * B] int64, the selected rows
    weight,  # [H]
    out,  # [A * B, H], contiguous
    new_residual,  # [A * B, H]
    stride_a,
    stride_b,
    residual_stride,
    new_stride,
    num_rows,  # A * B
    inner,  # B
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    SELECT: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = x is whole
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    source = ((row // inner) * stride_a + (row % inner) * stride_b)[:, None] + column[None, :]
    flat = row[:, None] * SIZE + column[None, :]
    w = tl.load(weight + column, mask=column < SIZE, other=0.0)
    wait_for_inputs(PDL)
    value = load_parts(x + source, inside, num_rows * SIZE, PARTS)
    if ADD:
        of = row
        if SELECT:
            of = tl.load(rows + row, mask=row < num_rows, other=0)
        at = of[:, None] * residual_stride + column[None, :]
        other = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(new_residual + row[:, None] * new_stride + column[None, :], value, mask=inside)
    v = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)
    normed = v * scale[:, None]
    if w.dtype != tl.float32:  # a float32 weight is applied before rounding
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + flat, (normed * w.to(tl.float32)[None, :]).to(dtype), mask=inside)


def norm_tiles(size: int) -> tuple[int, int, int]:
    """(columns of a block, rows of a program, warps) of a norm. The order of its sums depends on
    them, so they do not depend on the number of rows."""
    block = triton.next_power_of_2(size)
    per_program = max(1, min(16, 2048 // block))
    return block, per_program, 8 if block >= 4096 else 4


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    stream: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.linear.norm_rope.fused_add_rms_norm`; without a `residual` it norms x alone."""
    size = x.shape[-1]
    assert x.stride(-1) == 1, "rows must be contiguous"
    parts, like = 0, x
    if residual is not None and x.dim() > residual.dim():
        assert x.is_contiguous()
        parts, like, x = x.shape[0], residual, x[0]
    tokens = x.unsqueeze(0) if x.dim() == 2 else x  # [A, B, H]
    if tokens.dim() != 3:
        tokens = x.reshape(1, -1, size)
    num_rows = tokens.shape[0] * tokens.shape[1]
    if out is None:
        shape = (num_rows, size) if residual is not None else like.shape
        out = torch.empty(shape, dtype=like.dtype, device=x.device)
    new_residual = out
    if residual is not None:
        new_residual = torch.empty_like(out) if stream is None else stream
    assert out.is_contiguous() and new_residual.stride(-1) == 1
    others = out if residual is None else residual
    others = others if others.stride(-1) == 1 else others.contiguous()
    if num_rows:
        block, per_program, num_warps = norm_tiles(size)
        _rms_norm_kernel[(triton.cdiv(num_rows, per_program),)](
            tokens,
            others,
            others if rows is None else rows,
            weight,
            out,
            new_residual,
            *tokens.stride()[:2],
            size if residual is None else others.stride(0),
            size if residual is None else new_residual.stride(0),
            num_rows,
            tokens.shape[1],
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=per_program,
            ADD=residual is not None,
            SELECT=rows is not None,
            PARTS=parts,
            num_warps=num_warps,
            **pdl_options(out),
        )
    return out, new_residual


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See `kernels.linear.norm_rope.rms_norm`."""
    return fused_add_rms_norm(x, None, weight, eps, out=out)[0]


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotary_kernel(
    positions,  # [T] int64
    query,  # [T, Hq, D]; PARTS: [PARTS, T, Hq, D] float32, as key and value
    key,  # [T, Hk, D]
    value,  # [T, Hk, Dv]
    cos_sin,  # [max_position, ROT]
    slot_mapping,  # [T] int64
    query_gain,  # [D], weight of the norm of each query head
    key_gain,  # [D]
    query_out,  # [T, Hq, D], contiguous
    key_out,  # [T, Hk, D] or, with STORE, [slots, Hk, D]; contiguous
    value_out,  # as key_out
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    part_stride,
    eps,
    k_scale,  # of stored keys; None unless the cache is e4m3
    v_scale,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr,
    VALUE: tl.constexpr,  # whether values are written, too
    NORM: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = whole
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = query_out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # query heads, then key heads
    dim = tl.arange(0, BLOCK)
    half: tl.constexpr = ROT // 2
    rotates = dim < ROT
    partner, pair, is_first = pairs(dim, ROT, INTERLEAVED)
    wait_for_inputs(PDL)
    row = cos_sin + tl.load(positions + token) * ROT
    cos = tl.load(row + pair, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(row + half + pair, mask=rotates, other=0.0).to(tl.float32)
    sin = tl.where(is_first, -sin, sin)

    is_query = (head < Q_HEADS)[:, None]
    k_head = head - Q_HEADS
    is_key = (k_head >= 0)[:, None] & (k_head < K_HEADS)[:, None]
    dim_inside = dim < HEAD_DIM
    inside = dim_inside[None, :]
    base = query + token * q_stride_t + head[:, None] * q_stride_h
    x = load_parts(base + dim[None, :], is_query & inside, part_stride, PARTS)
    swapped = load_parts(base + partner[None, :], is_query & inside, part_stride, PARTS)
    x, swapped = x.to(tl.float32), swapped.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        gain = tl.load(query_gain + dim, mask=dim_inside, other=0.0).to(tl.float32)
        gain_swapped = tl.load(query_gain + partner, mask=dim_inside, other=0.0).to(tl.float32)
        x, swapped = x * scale * gain[None, :], swapped * scale * gain_swapped[None, :]
    rotated = x * cos[None, :] + swapped * sin[None, :]
    target = query_out + (token * Q_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(target, rotated.to(dtype), mask=is_query & inside)
    if K_HEADS > 0:
        base = key + token * k_stride_t + k_head[:, None] * k_stride_h
        x = load_parts(base + dim[None, :], is_key & inside, part_stride, PARTS)
        swapped = load_parts(base + partner[None, :], is_key & inside, part_stride, PARTS)
        x, swapped = x.to(tl.float32), swapped.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
            gain = tl.load(key_gain + dim, mask=dim_inside, other=0.0).to(tl.float32)
            gain_swapped = tl.load(key_gain + partner, mask=dim_inside, other=0.0).to(tl.float32)
            x, swapped = x * scale * gain[None, :], swapped * scale * gain_swapped[None, :]
        rotated = x * cos[None, :] + swapped * sin[None, :]
        destination = token
        if STORE:
            destination = tl.load(slot_mapping + token)
        writes = is_key & inside & (destination >= 0)
        target = (destination * K_HEADS + k_head[:, None]) * HEAD_DIM + dim[None, :]
        tl.store(key_out + target, to_cache(rotated, k_scale, dtype), mask=writes)
        if VALUE:
            base = value + token * v_stride_t + k_head[:, None] * v_stride_h
            x = load_parts(base + dim[None, :], is_key & inside, part_stride, PARTS)
            tl.store(value_out + target, to_cache(x, v_scale, dtype), mask=writes)


def _launch_rotary(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    rotation: Rotation,
    outputs: tuple[Tensor, Tensor, Tensor],
    slot_mapping: Tensor | None = None,
    scales: tuple[float, float] | None = None,
) -> None:
    """Sum parts, norm and rotate query and key, and write query, key and value to `outputs`.

    With `slot_mapping`, the outputs of key and value are caches, written at these slots. With
    `scales`, of keys and values, these caches are e4m3.
    """
    parts = query.shape[0] if query.dim() == 4 else 0
    part_stride = query.stride(0) if parts else 0
    if parts:
        assert key is not None and value is not None
        assert key.stride(0) == value.stride(0) == part_stride
        query, key, value = query[0], key[0], value[0]
    num_tokens, q_heads, head_dim = query.shape
    k_heads = 0 if key is None else key.shape[1]
    positions, cos_sin_cache, norms = rotation.positions, rotation.cos_sin_cache, rotation.norms
    assert query.stride(-1) == 1 and cos_sin_cache.is_contiguous()
    assert key is None or key.stride(-1) == 1
    keys = query if key is None else key
    values = keys if value is None else value
    assert values.stride(-1) == 1
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
            *((query, query) if norms is None else norms[:2]),
            *outputs,
            *(stride for x in (query, keys, values) for stride in x.stride()[:2]),
            part_stride,
            0.0 if norms is None else norms[2],
            *(scales or (None, None)),
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            HEAD_DIM=head_dim,
            ROT=cos_sin_cache.shape[1],
            INTERLEAVED=rotation.interleaved,
            STORE=slot_mapping is not None,
            VALUE=value is not None,
            NORM=norms is not None,
            PARTS=parts,
            HEADS=heads,
            BLOCK=block,
            **pdl_options(query),
        )


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor for x [T, H, D], or for the sum of its parts."""
    return torch.empty(x.shape[-3:], dtype=dtype, device=x.device)


def rotary_embedding(
    query: Tensor, key: Tensor | None, rotation: Rotation
) -> tuple[Tensor, Tensor | None]:
    """See `kernels.linear.norm_rope.rotary_embedding`."""
    rotated = _like(query, query.dtype)
    key_out = None if key is None else _like(key, key.dtype)
    keys = rotated if key_out is None else key_out
    _launch_rotary(query, key, None, rotation, (rotated, keys, keys))
    return rotated, key_out


def rotary_qkv(
    query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.attention.rotary_store_kv.rotary_qkv`."""
    outputs = (_like(query, dtype), _like(key, dtype), _like(value, dtype))
    _launch_rotary(query, key, value, rotation, outputs)
    return outputs


def rotary_store_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    fp8: Any = None,
    halves: tuple[int, int] | None = None,
) -> Tensor:
    """See `kernels.attention.rotary_store_kv.rotary_store_kv`.

    `halves` overrides `HALVES`.
    """
    assert kv_cache.is_contiguous()
    dtype = kv_cache.dtype if fp8 is None else fp8.dtype
    scales = None if fp8 is None else (fp8.k_scale, fp8.v_scale)
    rotated = _like(query, dtype if query.dim() == 4 else query.dtype)
    outputs = (rotated, kv_cache[0], kv_cache[1])
    halves = halves or HALVES
    if halves is not None and turns_halves(query, rotation):
        rotate_halves(query, key, value, rotation, outputs, slot_mapping, scales, halves)
        return rotated
    _launch_rotary(query, key, value, rotation, outputs, slot_mapping, scales)
    return rotated


hash_functions(globals())
