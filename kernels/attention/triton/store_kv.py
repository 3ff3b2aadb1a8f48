"""Triton version of `kernels.attention.store_kv`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions
from ...quant.triton.e4m3 import to_e4m3
from ..paged_rows import Fp8Cache
from .latent_rows import store_latent


@triton.jit(
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_kv_kernel(
    key,  # [T, H, D]
    value,  # [T, H, D]
    key_cache,  # [slots, H, D], contiguous
    value_cache,  # [slots, H, D]
    slot_mapping,  # [T] int64
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    k_scale,  # None unless the cache is e4m3
    v_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_VALUE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        size: tl.constexpr = NUM_HEADS * HEAD_DIM
        offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < size
        head, dim = offset // HEAD_DIM, offset % HEAD_DIM
        source = token * key_stride_t + head * key_stride_h + dim
        row = tl.load(key + source, mask=inside)
        if k_scale is not None:
            row = to_e4m3(row, k_scale)
        tl.store(key_cache + slot * size + offset, row, mask=inside)
        if HAS_VALUE:
            source = token * value_stride_t + head * value_stride_h + dim
            row = tl.load(value + source, mask=inside)
            if v_scale is not None:
                row = to_e4m3(row, v_scale)
            tl.store(value_cache + slot * size + offset, row, mask=inside)


def store_kv(
    key: Tensor,
    value: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    fp8: Fp8Cache | None = None,
    all_valid: bool = False,
) -> None:
    """See `kernels.attention.store_kv.store_kv`; `all_valid` saves nothing here."""
    if fp8 is not None and fp8.latent:
        assert value is None
        store_latent(key, kv_cache, slot_mapping, fp8.latent)
        return
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    assert kv_cache.is_contiguous() and key.stride(-1) == 1, "rows must be contiguous"
    values = key if value is None else value
    assert values.stride(-1) == 1, "rows must be contiguous"
    size = num_heads * head_dim
    block = min(1024, triton.next_power_of_2(size))
    _store_kv_kernel[(num_tokens, triton.cdiv(size, block))](
        key,
        values,
        kv_cache if value is None else kv_cache[0],
        kv_cache if value is None else kv_cache[1],
        slot_mapping,
        *key.stride()[:2],
        *values.stride()[:2],
        None if fp8 is None else fp8.k_scale,
        None if fp8 is None else fp8.v_scale,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
        HAS_VALUE=value is not None,
    )


hash_functions(globals())
