"""What follows a QKV projection up to the attention's output: sum of its parts, norm of each head,
rotary embedding, write of keys and values, attention. One kernel for steps of few tokens a request.
"""

from __future__ import annotations

from torch import Tensor

from ..device import use_triton
from .paged_attention import paged_attention
from .rotary_store_kv import HeadNorms, rotary_store_kv


def rotary_attention(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_query_len: int,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """`rotary_store_kv`, then `paged_attention` of the rotated queries; arguments as there.
    One kernel only if `arrivals` are given: int32 zeros, one for each request and key head, which
    are zeros again when it ends.

    Where a token's slot is -1, what its request attends to at its position is not defined.
    Returns [T, Hq, D].
    """
    one_dtype = query.dim() == 4 or query.dtype == kv_cache.dtype
    if arrivals is not None and use_triton(query) and sinks is None and one_dtype:
        from .triton import rotary_attention as fused
        from .triton.attention_plan import plan_for

        plan = plan_for(query, kv_cache, block_table, seq_lens.shape[0], max_query_len)
        if plan.fused:
            out: Tensor = fused.rotary_attention(
                query,
                key,
                value,
                positions,
                cos_sin_cache,
                kv_cache,
                slot_mapping,
                block_table,
                query_start_loc,
                seq_lens,
                scale,
                plan,
                arrivals,
                interleaved,
                norms,
                sliding_window,
                softcap,
            )
            return out
    rotated = rotary_store_kv(
        positions, query, key, value, cos_sin_cache, kv_cache, slot_mapping, interleaved, norms
    )
    return paged_attention(
        rotated,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        scale,
        max_query_len,
        sliding_window,
        softcap,
        sinks,
    )
