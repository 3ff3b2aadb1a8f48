"""DeepSeek's indexer: chooses the entries (V4) or tokens (V3.2) that each token attends to.

The score of entry w for a token is sum_h weight_h * relu(q_h . k_w), over the indexer's heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import use_triton
from .pages import Pages, SlotList, TokenRows, entry_slots, list_slots

_SCORES = 1 << 26  # at a time; a long prefill is cut into parts of token rows
_TOKENS = 32  # of the plain version at a time, since each gathers all of its keys


def select_entries(
    query: Tensor,
    weights: Tensor,
    keys: Pages,
    entries: Pages,
    tokens: TokenRows,
    top_k: int,
    most: int,
) -> SlotList:
    """The slots in `entries` of the `top_k` best visible entries of each token, best first.

    query: [M, heads, D], rotated; weights: [M, heads] float32, which include all scales; `keys` has
    one row for each entry; `most` is a bound on the entries of a request. If no request can have
    more than `top_k`, all are taken, oldest first.
    """
    if most <= top_k:
        return entry_slots(entries, tokens, most)
    rows, at_once = query.shape[0], max(1, _SCORES // most)
    if rows > at_once:
        parts = [
            _select(query[p], weights[p], keys, entries, tokens.part(p), top_k, most)
            for p in (slice(at, at + at_once) for at in range(0, rows, at_once))
        ]
        slots, counts = zip(*((part.slots, part.counts) for part in parts), strict=True)
        return SlotList(torch.cat(slots), torch.cat(counts))
    return _select(query, weights, keys, entries, tokens, top_k, most)


def _select(
    query: Tensor,
    weights: Tensor,
    keys: Pages,
    entries: Pages,
    tokens: TokenRows,
    top_k: int,
    most: int,
) -> SlotList:
    if use_triton(query):
        from .triton.select_entries import score_entries as score_entries_triton

        scores: Tensor = score_entries_triton(query, weights, keys, tokens, most)
        chosen = scores.topk(top_k, dim=1)[1]  # invisible entries come last
    else:
        scores = score_entries_reference(query, weights, keys, tokens, most)
        # Of equal scores the oldest entries, so that a token's choice does not depend on `most`.
        chosen = scores.sort(dim=1, descending=True, stable=True)[1][:, :top_k]
    return list_slots(entries, tokens, top_k, False, chosen)


def score_entries_reference(
    query: Tensor, weights: Tensor, keys: Pages, tokens: TokenRows, most: int
) -> Tensor:
    """The scores of all entries, [M, most] float32; -inf for those that the token does not see."""
    listed = entry_slots(keys, tokens, most)
    out = torch.empty(listed.slots.shape, dtype=torch.float32, device=query.device)
    for at in range(0, query.shape[0], _TOKENS):
        part = slice(at, at + _TOKENS)
        slots = listed.slots[part]
        rows = keys.gather(slots)  # [m, most, D]
        products = torch.bmm(query[part].float(), rows.transpose(1, 2)).relu_()
        scores = torch.bmm(weights[part].unsqueeze(1), products).squeeze(1)
        out[part] = scores.masked_fill(slots < 0, float("-inf"))
    return out
