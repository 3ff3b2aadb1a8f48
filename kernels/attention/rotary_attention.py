"""What follows a QKV projection up to the attention's output: sum of its parts, norm of each head,
rotary embedding, write of keys and values, attention. One kernel for steps of few tokens a request.
"""

from __future__ import annotations

from torch import Tensor

from ..device import use_triton
from ..linear.rotation import Rotation
from .paged_attention import paged_attention
from .paged_rows import AttentionRule, PagedRows
from .rotary_store_kv import rotary_store_kv


def rotary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    kv_cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
) -> Tensor:
    """`rotary_store_kv`, then `paged_attention` of the rotated queries; arguments as there.

    It is one kernel if `rows.arrivals` are given and the launch plan allows it, else two. Where a
    token's slot is -1, what its request attends to at its position is undefined.
    Returns [T, Hq, D].
    """
    one_dtype = query.dim() == 4 or query.dtype == kv_cache.dtype
    if rows.arrivals is not None and use_triton(query) and rule.sinks is None and one_dtype:
        from .triton import rotary_attention as fused
        from .triton.attention_plan import plan_for

        plan = plan_for(query, kv_cache, rows)
        if plan.fused:
            out: Tensor = fused.rotary_attention(
                query, key, value, rotation, kv_cache, rows, rule, plan
            )
            return out
    rotated = rotary_store_kv(query, key, value, rotation, kv_cache, rows.slot_mapping)
    return paged_attention(rotated, kv_cache, rows, rule)
