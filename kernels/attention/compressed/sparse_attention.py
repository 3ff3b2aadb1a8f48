"""DeepSeek's sparse attention: each token reads listed rows of a cache, in V4 of two.

A row is a key, and its first `dim_v` values are the value, in V4 all of them. In V4 each head has
a sink, a logit that takes part in the softmax and carries no value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...operation import operation
from .pages import Pages, SlotList

_TOKENS = 32  # of the plain version at a time, since each gathers all of its rows


def sparse_attention_reference(
    query: Tensor,
    raw: Pages,
    window: SlotList,
    entries: Pages | None,
    chosen: SlotList | None,
    sinks: Tensor | None,
    scale: float,
    dim_v: int | None = None,
) -> Tensor:
    """Attend to the rows `window` of `raw` and the rows `chosen` of `entries`, if there are any.

    query: [M, H, D]; sinks: [H] float32; `dim_v` is D if it is None. Returns [M, H, dim_v].
    """
    size = query.shape[2] if dim_v is None else dim_v
    out = query.new_empty((*query.shape[:2], size))
    lists = [(raw, window.slots)]
    if entries is not None and chosen is not None:
        lists.append((entries, chosen.slots))
    for at in range(0, query.shape[0], _TOKENS):
        part = slice(at, at + _TOKENS)
        slots = torch.cat([slots[part] for _, slots in lists], dim=1)
        rows = torch.cat([pages.gather(slots[part]) for pages, slots in lists], dim=1)
        scores = torch.bmm(query[part].float(), rows.transpose(1, 2)) * scale  # [m, H, S]
        scores = scores.masked_fill((slots < 0).unsqueeze(1), float("-inf"))
        if sinks is None:
            shares = scores.softmax(dim=2)
        else:
            sink = sinks.expand(scores.shape[0], -1).unsqueeze(2)
            shares = torch.cat((scores, sink), dim=2).softmax(dim=2)[..., :-1]
        out[part] = torch.bmm(shares, rows[..., :size]).to(query.dtype)
    return out


sparse_attention = operation(sparse_attention_reference, "query", ".triton.sparse_attention")
