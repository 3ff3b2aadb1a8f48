"""What follows a QKV projection in one: sum of its parts, norm of each head, rotary embedding, and
the write of keys and values into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import use_triton
from ..linear.norm_rope import rms_norm_reference, rotary_embedding_reference
from .store_kv import store_kv_reference

HeadNorms = tuple[Tensor, Tensor, float]  # weights of query and key heads, each [D], and eps


def rotary_store_kv(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate, write rotated keys and values at their slots (-1: nothing); the rotated queries.

    positions, slot_mapping: [T] int64; query: [T, Hq, D]; key, value: [T, Hkv, D]; or all three
    float32 parts [S, T, H, D] of one tensor, whose sums are meant; cos_sin_cache: [max_position,
    rot_dim]; kv_cache: [2, num_blocks, block_size, Hkv, D]. Heads are normed first where `norms`
    are given. Returns [T, Hq, D].
    """
    if use_triton(query):
        from ..linear.triton.norm_rope import rotary_store_kv as rotary_store_kv_triton

        out: Tensor = rotary_store_kv_triton(
            positions, query, key, value, cos_sin_cache, kv_cache, slot_mapping, interleaved, norms
        )
        return out
    return rotary_store_kv_reference(
        positions, query, key, value, cos_sin_cache, kv_cache, slot_mapping, interleaved, norms
    )


def rotary_store_kv_reference(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Plain version of `rotary_store_kv`."""
    dtype = kv_cache.dtype if query.dim() == 4 else query.dtype
    query, key, value = rotary_qkv_reference(
        positions, query, key, value, cos_sin_cache, dtype, interleaved, norms
    )
    store_kv_reference(key, value, kv_cache, slot_mapping)
    return query


def rotary_qkv(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    dtype: torch.dtype,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary_store_kv` without the cache: query, key and value in `dtype`, ready to be stored."""
    if use_triton(query):
        from ..linear.triton.norm_rope import rotary_qkv as rotary_qkv_triton

        out: tuple[Tensor, Tensor, Tensor] = rotary_qkv_triton(
            positions, query, key, value, cos_sin_cache, dtype, interleaved, norms
        )
        return out
    return rotary_qkv_reference(
        positions, query, key, value, cos_sin_cache, dtype, interleaved, norms
    )


def rotary_qkv_reference(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    dtype: torch.dtype,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain version of `rotary_qkv`."""
    if query.dim() == 4:
        query, key, value = (part.sum(0) for part in (query, key, value))
    if norms is not None:
        query_weight, key_weight, eps = norms
        query = rms_norm_reference(query, query_weight, eps)
        key = rms_norm_reference(key, key_weight, eps)
    rotated, key_out = rotary_embedding_reference(positions, query, key, cos_sin_cache, interleaved)
    assert key_out is not None
    return rotated.to(dtype), key_out.to(dtype), value.to(dtype)
