"""Writes the keys and values of a step into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operation import operation
from ..quant.e4m3 import E4M3, pack_latent, quantise
from .paged_rows import Fp8Cache


def store_kv_reference(
    key: Tensor,
    value: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    fp8: Fp8Cache | None = None,
    all_valid: bool = False,
) -> None:
    """Write row t of `key` and `value` at cache slot `slot_mapping[t]`; for slot -1 write nothing.

    key: [T, Hkv, D]; value: [T, Hkv, D], None for MLA; slot_mapping: [T] int64, block * block_size
    + offset; kv_cache: [2, num_blocks, block_size, Hkv, D], for MLA [num_blocks, block_size, 1, D].
    With `fp8` the cache is e4m3, and the rows of MLA are packed ones (`pack_latent`). With
    `all_valid` the caller promises that no slot is -1.
    """
    if not all_valid:
        rows = (slot_mapping >= 0).nonzero().squeeze(1)  # [written] token rows
        if rows.numel() < slot_mapping.numel():
            slot_mapping = slot_mapping[rows]
            key = key[rows]
            value = None if value is None else value[rows]
    if fp8 is not None:  # torch has no indexed copy of e4m3, but of bytes
        assert kv_cache.dtype == E4M3
        if fp8.latent:
            key = pack_latent(key, fp8.latent)
        else:
            key = quantise(key, fp8.k_scale).view(torch.uint8)
        value = None if value is None else quantise(value, fp8.v_scale).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    if value is None:
        kv_cache.flatten(0, 1).index_copy_(0, slot_mapping, key.to(kv_cache.dtype))
        return
    # [2, slots, Hkv, D]: flattening blocks and offsets of a contiguous cache is a view
    keys, values = kv_cache.flatten(1, 2).unbind(0)
    if key.dtype != kv_cache.dtype:
        key, value = key.to(kv_cache.dtype), value.to(kv_cache.dtype)
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)


store_kv = operation(store_kv_reference, "kv_cache", ".triton.store_kv")
