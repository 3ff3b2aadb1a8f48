"""DeepSeek V4's attention: each token reads listed rows of two caches, raw and compressed.

A row is both key and value. Each head has a sink, a logit that takes part in the softmax and
carries no value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import use_triton
from .pages import Pages, SlotList

_TOKENS = 32  # of the plain version at a time, since each gathers all of its rows


def sparse_attention(
    query: Tensor,
    raw: Pages,
    window: SlotList,
    entries: Pages | None,
    chosen: SlotList | None,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    """Attend to the rows `window` of `raw` and the rows `chosen` of `entries`, if there are any.

    query: [M, H, D]; sinks: [H] float32. Returns [M, H, D].
    """
    if use_triton(query):
        from .triton.sparse_attention import sparse_attention as sparse_attention_triton

        out: Tensor = sparse_attention_triton(query, raw, window, entries, chosen, sinks, scale)
        return out
    return sparse_attention_reference(query, raw, window, entries, chosen, sinks, scale)


def sparse_attention_reference(
    query: Tensor,
    raw: Pages,
    window: SlotList,
    entries: Pages | None,
    chosen: SlotList | None,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    """The plain version of `sparse_attention`."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lists = [(raw.rows, window.slots)]
    if entries is not None and chosen is not None:
        lists.append((entries.rows, chosen.slots))
    for at in range(0, query.shape[0], _TOKENS):
        part = slice(at, at + _TOKENS)
        slots = torch.cat([slots[part] for _, slots in lists], dim=1)
        rows = torch.cat([rows[slots[part].clamp(min=0)] for rows, slots in lists], dim=1).float()
        scores = torch.bmm(query[part].float(), rows.transpose(1, 2)) * scale  # [m, H, S]
        scores = scores.masked_fill((slots < 0).unsqueeze(1), float("-inf"))
        sink = sinks.expand(scores.shape[0], -1).unsqueeze(2)
        shares = torch.cat((scores, sink), dim=2).softmax(dim=2)[..., :-1]
        out[part] = torch.bmm(shares, rows).to(query.dtype)
    return out
