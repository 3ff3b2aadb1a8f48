"""Rotary embedding of heads: parts of other kernels, and a kernel that also writes the cache."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ...quant.triton.e4m3 import to_cache
from ..rotation import Rotation


@triton.jit
def load_parts(pointers, inside, stride, PARTS: tl.constexpr):
    """Load the values at `pointers`, or sum PARTS parts that are `stride` apart, in order and in
    float32."""
    value = tl.load(pointers, mask=inside, other=0.0)
    if PARTS > 0:
        value = value.to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(pointers + part * stride, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def pairs(dim, ROT: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each dim [D]: (partner in its pair, number of the pair, whether it is the first member).

    Only the first ROT dims rotate; a dim beyond them is its own partner.
    """
    half: tl.constexpr = ROT // 2
    if INTERLEAVED:
        partner, pair, is_first = dim ^ 1, dim // 2, dim % 2 == 0
    else:
        partner, pair, is_first = (dim + half) % ROT, dim % half, dim < half
    return tl.where(dim < ROT, partner, dim), pair, is_first


@triton.jit
def rotated(
    rows,  # [R] pointers to heads
    inside,  # [R, D]
    gain,  # [D], weight of the norm of each head
    cos,  # [R, D]
    sin,  # [R, D], with the sign of its term
    dim,  # [D]
    partner,  # [D]
    part_stride,
    eps,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Load heads, sum their parts, norm and rotate them; [R, D] float32."""
    x = load_parts(rows[:, None] + dim[None, :], inside, part_stride, PARTS).to(tl.float32)
    swapped = load_parts(rows[:, None] + partner[None, :], inside, part_stride, PARTS)
    swapped = swapped.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        own = tl.load(gain + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        other = tl.load(gain + partner, mask=dim < DIM, other=0.0).to(tl.float32)
        x, swapped = x * scale * own[None, :], swapped * scale * other[None, :]
    return x * cos + swapped * sin


@triton.jit
def angles(
    cos_sin,
    position,
    dim,
    pair,
    is_first,
    ROT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the cosines and signed sines of rows at `position` [R], both [R, D] float32."""
    row = cos_sin + position[:, None] * ROT + pair[None, :]
    if ROT == BLOCK:
        cos, sin = tl.load(row), tl.load(row + ROT // 2)
    else:
        rotates = (dim < ROT)[None, :]
        cos = tl.load(row, mask=rotates, other=1.0)
        sin = tl.load(row + ROT // 2, mask=rotates, other=0.0)
    sin = sin.to(tl.float32)
    return cos.to(tl.float32), tl.where(is_first[None, :], -sin, sin)


@triton.jit
def _turn_halves(
    source,  # [HEADS] pointers to heads
    target,  # [HEADS], where to write them
    inside,  # [HEADS]
    angles,  # the cosines of the token, then the sines
    scale,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate heads, where dimension i of the first half and of the second are a pair. A thread
    loads the angles of its dimensions once for all of its heads, and each number once."""
    dim = tl.arange(0, HALF)
    read, write = source[:, None] + dim[None, :], target[:, None] + dim[None, :]
    first = tl.load(read, mask=inside[:, None], other=0.0).to(tl.float32)
    second = tl.load(read + HALF, mask=inside[:, None], other=0.0).to(tl.float32)
    cos = tl.load(angles + dim).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF + dim).to(tl.float32)[None, :]
    turned = to_cache(first * cos - second * sin, scale, dtype)
    tl.store(write, turned, mask=inside[:, None])
    turned = to_cache(second * cos + first * sin, scale, dtype)
    tl.store(write + HALF, turned, mask=inside[:, None])


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotary_halves_kernel(
    positions,  # [T] int64
    query,  # [T, Hq, 2 * HALF]
    key,  # [T, Hk, 2 * HALF]
    value,  # [T, Hk, 2 * HALF]
    cos_sin,  # [max_position, 2 * HALF]
    slot_mapping,  # [T] int64
    query_out,  # [T, Hq, 2 * HALF], contiguous
    key_cache,  # [slots, Hk, 2 * HALF], contiguous
    value_cache,  # [slots, Hk, 2 * HALF]
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_scale,  # of stored keys; None unless the cache is e4m3
    v_scale,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    QUERIES: tl.constexpr,  # of a program
    KEYS: tl.constexpr,  # of a program, or values
    PDL: tl.constexpr,
):
    """A program has queries, keys or values of a token."""
    dtype: tl.constexpr = query_out.dtype.element_ty
    size: tl.constexpr = 2 * HALF
    q_blocks: tl.constexpr = (Q_HEADS + QUERIES - 1) // QUERIES
    k_blocks: tl.constexpr = (K_HEADS + KEYS - 1) // KEYS
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_inputs(PDL)
    if block < q_blocks:
        q_head = block * QUERIES + tl.arange(0, QUERIES)
        angles_q = cos_sin + tl.load(positions + token) * size
        source = query + token * q_stride_t + q_head * q_stride_h
        target = query_out + (token * Q_HEADS + q_head) * size
        _turn_halves(source, target, q_head < Q_HEADS, angles_q, None, dtype, HALF)
    else:
        slot = tl.load(slot_mapping + token)
        head = (block - q_blocks) % k_blocks * KEYS + tl.arange(0, KEYS)
        inside = (head < K_HEADS) & (slot >= 0)
        if block < q_blocks + k_blocks:
            angles_k = cos_sin + tl.load(positions + token) * size
            key_source = key + token * k_stride_t + head * k_stride_h
            key_target = key_cache + (slot * K_HEADS + head) * size
            _turn_halves(key_source, key_target, inside, angles_k, k_scale, dtype, HALF)
        else:
            dim = tl.arange(0, size)
            value_source = value + token * v_stride_t + head * v_stride_h
            value_target = value_cache + (slot * K_HEADS + head) * size
            x = tl.load(value_source[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
            x = to_cache(x, v_scale, dtype)
            tl.store(value_target[:, None] + dim[None, :], x, mask=inside[:, None])


def turns_halves(query: Tensor, rotation: Rotation) -> bool:
    """Whether `rotate_halves` computes these heads: all of their dimensions are rotated, their
    halves are pairs, and they have no norms. The number of rows has no influence, so a row's
    bits do not depend on it."""
    dim = query.shape[-1]
    return (
        query.dim() == 3
        and rotation.norms is None
        and not rotation.interleaved
        and rotation.cos_sin_cache.shape[1] == dim
        and dim >= 32
        and dim & (dim - 1) == 0
    )


def rotate_halves(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    outputs: tuple[Tensor, Tensor, Tensor],
    slot_mapping: Tensor,
    scales: tuple[float, float] | None,
    tiles: tuple[int, int],
) -> None:
    """Write rotated queries, and rotated keys and values at their slots, to `outputs`.

    `tiles` are the heads of a program, a power of two, and its warps; `scales` are those of an e4m3
    cache.
    """
    num_tokens, q_heads, dim = query.shape
    k_heads, (heads, num_warps) = key.shape[1], tiles
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert rotation.cos_sin_cache.is_contiguous()
    if num_tokens:
        keys = min(heads, triton.next_power_of_2(k_heads))
        blocks = triton.cdiv(q_heads, heads) + 2 * triton.cdiv(k_heads, keys)
        _rotary_halves_kernel[(num_tokens, blocks)](
            rotation.positions, query, key, value, rotation.cos_sin_cache, slot_mapping, *outputs,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0),
            value.stride(1), *(scales or (None, None)), Q_HEADS=q_heads, K_HEADS=k_heads,
            HALF=dim // 2, QUERIES=heads, KEYS=keys, num_warps=num_warps, **pdl_options(query),
        )  # fmt: skip


hash_functions(globals())
