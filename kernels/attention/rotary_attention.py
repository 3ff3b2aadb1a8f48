"""Everything between a QKV projection and the attention output, in one kernel where possible.

That is: the sum of the projection's parts, the norm of each head, rotary embedding, the KV write
and attention. One kernel does it all if each request has only a few new tokens.
"""

from __future__ import annotations

from dataclasses import replace

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

    One kernel does both if `rows.arrivals` is given and the launch plan allows it; `rows.parts` are
    computed one after the other. If a token's slot is -1, the key and value that its request reads
    at that position are undefined. Returns [T, Hq, D], which is `out` if that is given.
    """
    if rows.parts and use_triton(query):
        return _by_parts(query, key, value, rotation, kv_cache, rows.parts, rule, out)
    one_dtype = query.dim() == 4 or query.dtype == rule.dtype_of(kv_cache)
    if rows.arrivals is not None and use_triton(query) and one_dtype:
        from .triton import rotary_attention as fused
        from .triton.attention_plan import plan_for

        plan = plan_for(query, kv_cache, rows, rule)
        if plan.fused:
            attended: Tensor = fused.rotary_attention(
                query, key, value, rotation, kv_cache, rows, rule, plan, out
            )
            return attended
    rotated = rotary_store_kv(query, key, value, rotation, kv_cache, rows.slot_mapping, rule.fp8)
    return paged_attention(rotated, kv_cache, rows, rule, out)


def _by_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    kv_cache: Tensor,
    parts: tuple[PagedRows, PagedRows],
    rule: AttentionRule,
    out: Tensor | None,
) -> Tensor:
    if out is None:
        dtype = rule.dtype_of(kv_cache) if query.dim() == 4 else query.dtype
        out = torch.empty(query.shape[-3:], dtype=dtype, device=query.device)
    start = 0
    for part in parts:
        end = start + part.slot_mapping.shape[0]
        q, k, v = (heads[..., start:end, :, :] for heads in (query, key, value))
        turn = replace(rotation, positions=rotation.positions[start:end])
        rotary_attention(q, k, v, turn, kv_cache, part, rule, out[start:end])
        start = end
    return out
