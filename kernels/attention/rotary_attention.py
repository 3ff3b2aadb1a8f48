"""Everything between a QKV projection and the attention output, in one kernel where possible.

That is: the sum of the projection's parts, the norm of each head, rotary embedding, the KV write
and attention. One kernel does it all if each request has only a few new tokens.
"""

from __future__ import annotations

import torch
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
    out: Tensor | None = None,
) -> Tensor:
    """`rotary_store_kv`, then `paged_attention` of the rotated queries; arguments as there.

    One kernel does both for requests that the launch plan of `rows` allows, if `rows.arrivals` is
    given. If a token's slot is -1, the key and value that its request reads at that position are
    undefined. Returns [T, Hq, D], which is `out` if that is given.
    """
    can_fuse = rows.arrivals is not None and use_triton(query)
    can_fuse = can_fuse and (query.dim() == 4 or query.dtype == rule.dtype_of(kv_cache))

    def fused(rows: PagedRows) -> Tensor | None:
        """All of it in one kernel; None if the launch plan does not allow that."""
        from .triton import rotary_attention as kernel
        from .triton.attention_plan import plan_for, summed_inside

        plan = plan_for(query, kv_cache, rows, rule)
        if not plan.fused:
            return None
        plan = summed_inside(plan) if rotation.whole else plan
        args = query, key, value, rotation, kv_cache, rows, rule, plan, out
        result: Tensor = kernel.rotary_attention(*args)
        return result

    if can_fuse and not rows.short_len:
        result = fused(rows)
        if result is not None:
            return result
    rotated = rotary_store_kv(query, key, value, rotation, kv_cache, rows.slot_mapping, rule.fp8)
    if can_fuse and rows.short_len:
        # the fused kernel writes the keys and values of its requests once more
        short, long = rows.by_length()
        out = torch.empty_like(rotated) if out is None else out
        if fused(short) is not None:
            return paged_attention(rotated, kv_cache, long, rule, out)
    return paged_attention(rotated, kv_cache, rows, rule, out)
