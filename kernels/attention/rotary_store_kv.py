"""Sums the parts of a QKV projection, norms and rotates its heads, and writes keys and values into
the cache, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.norm_rope import rms_norm_reference, rotary_embedding_reference
from ..linear.rotation import Rotation
from ..operation import operation
from .paged_rows import Fp8Cache
from .store_kv import store_kv_reference


def rotary_store_kv_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    fp8: Fp8Cache | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values at their slots, return the rotated queries.

    query: [T, Hq, D]; key, value: [T, Hkv, D]; or all three float32 parts [S, T, H, D] of one
    tensor, which are summed first; slot_mapping: [T] int64, -1 = write nothing;
    kv_cache: [2, num_blocks, block_size, Hkv, D], of e4m3 with `fp8`. Returns [T, Hq, D].
    """
    dtype = kv_cache.dtype if fp8 is None else fp8.dtype
    dtype = dtype if query.dim() == 4 else query.dtype
    query, key, value = rotary_qkv_reference(query, key, value, rotation, dtype)
    store_kv_reference(key, value, kv_cache, slot_mapping, fp8=fp8)
    return query


rotary_store_kv = operation(rotary_store_kv_reference, "query", "..linear.triton.norm_rope")


def rotary_qkv_reference(
    query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary_store_kv` without the cache: query, key and value in `dtype`, ready to be stored."""
    if query.dim() == 4:
        query, key, value = (part.sum(0) for part in (query, key, value))
    if rotation.norms is not None:
        query_weight, key_weight, eps = rotation.norms
        query = rms_norm_reference(query, query_weight, eps)
        key = rms_norm_reference(key, key_weight, eps)
    rotated, key_out = rotary_embedding_reference(query, key, rotation)
    assert key_out is not None
    return rotated.to(dtype), key_out.to(dtype), value.to(dtype)


rotary_qkv = operation(rotary_qkv_reference, "query", "..linear.triton.norm_rope")
