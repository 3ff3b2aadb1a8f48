"""Rotary embedding of queries and keys, and the write of keys and values into the cache, in one."""

from __future__ import annotations

from torch import Tensor

from .device import use_triton
from .norm_rope import rotary_embedding_reference
from .store_kv import store_kv_reference


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
    """Rotate, write rotated keys and values at their slots (-1: nothing); the rotated queries.

    positions, slot_mapping: [T] int64; query: [T, Hq, D]; key, value: [T, Hkv, D];
    cos_sin_cache: [max_position, rot_dim]; kv_cache: [2, num_blocks, block_size, Hkv, D].
    Returns [T, Hq, D].
    """
    if use_triton(query):
        from .triton.norm_rope import rotary_store_kv as rotary_store_kv_triton

        out: Tensor = rotary_store_kv_triton(
            positions, query, key, value, cos_sin_cache, kv_cache, slot_mapping, interleaved
        )
        return out
    return rotary_store_kv_reference(
        positions, query, key, value, cos_sin_cache, kv_cache, slot_mapping, interleaved
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
) -> Tensor:
    """Plain version of `rotary_store_kv`."""
    rotated, key_out = rotary_embedding_reference(positions, query, key, cos_sin_cache, interleaved)
    assert key_out is not None
    store_kv_reference(key_out, value, kv_cache, slot_mapping)
    return rotated
