"""FlashMLA's sparse kernel of DeepSeek V3.2 and V4: tokens attend to listed rows of 16 bits.

The kernel reads rows of one tensor, so in V4 a layer's raw rows and its entries lie side by side in
memory (`AttentionLayer.follows`). It plans nothing: a pass prepares lists of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.attention.compressed.pages import Pages, SlotList
from .base import AttentionLayer

DIM = 512  # of a value, and of a row of V4
DIMS = (DIM, 576)  # of a row
HEADS = (64, 128)  # numbers of heads that the kernels support; a query is padded to one of them
_ROWS = 128  # the number of listed rows must be a multiple

# `flash_mla.flash_mla_sparse_fwd`
SparseForward = Callable[..., tuple[Tensor, Any, Any]]


class SparsePass:
    """The attention of one pass. Neighbouring layers that read the same lists share the joined one;
    older ones are let go, because those of a long prefill are large."""

    def __init__(self, forward: SparseForward) -> None:
        self._forward = forward
        self._joined: tuple[SlotList, SlotList | None, Tensor] | None = None  # the newest lists

    def __call__(
        self,
        query: Tensor,
        raw: Pages,
        window: SlotList,
        entries: Pages | None,
        chosen: SlotList | None,
        sinks: Tensor | None,
        scale: float,
        dim_v: int | None = None,
    ) -> Tensor:
        rows = raw.rows if entries is None else joined_rows(raw, entries)
        last = self._joined
        if last is None or last[0] is not window or last[1] is not chosen:
            last = (window, chosen, joined_slots(window, chosen, raw.rows.shape[0]))
            self._joined = last
        heads = query.shape[1]
        query, sinks = padded_heads(query, sinks)
        # A joined list has gaps; a single one ends, which spares the kernel the rest.
        counts = window.counts if chosen is None else None
        out: Tensor = self._forward(
            query, rows.unsqueeze(1), last[2], scale, dim_v or rows.shape[1],
            attn_sink=sinks, topk_length=counts, use_legacy=True, return_log2_lse=False,
        )[0]  # fmt: skip
        return out[:, :heads]


def padded_heads(query: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Query [M, H, D] and sinks [H] with as many heads as a kernel supports."""
    heads = query.shape[1]
    more = next(count for count in HEADS if count >= heads) - heads
    if more == 0:
        return query, sinks
    return pad(query, (0, 0, 0, more)), None if sinks is None else pad(sinks, (0, more))


def problem(layer: AttentionLayer) -> str | None:
    """Why the kernels for listed rows cannot attend in this layer, or None."""
    if not layer.attends:
        return None
    if layer.head_dim not in DIMS or layer.head_dim_v != DIM:
        return f"its sparse kernels read rows of {DIMS[0]} or {DIMS[1]}, not of {layer.head_dim}"
    if layer.num_heads > HEADS[-1]:
        return f"its sparse kernels have {HEADS[-1]} heads at most, not {layer.num_heads}"
    if layer.fp8 is not None and layer.fp8.rotary not in (0, 64):
        return f"its fp8 rows end with 64 rotated values, not {layer.fp8.rotary}"
    return None


def joined_slots(window: SlotList, chosen: SlotList | None, num_raw: int) -> Tensor:
    """Both lists as rows of the joined tensor, [M, 1, a multiple of 128] int32; -1 = none."""
    slots = window.slots
    if chosen is not None:
        behind = torch.where(chosen.slots >= 0, chosen.slots + num_raw, -1)
        slots = torch.cat((slots, behind), dim=1)
    return pad(slots, (0, -slots.shape[1] % _ROWS), value=-1).unsqueeze(1)


def joined_rows(raw: Pages, entries: Pages) -> Tensor:
    """The rows of both caches as one tensor, those of `raw` first; they are adjacent in memory."""
    count = raw.cache.numel() + entries.cache.numel()
    assert entries.cache.data_ptr() == raw.cache.data_ptr() + raw.cache.nbytes
    dim = raw.cache.shape[-1]
    return raw.cache.as_strided((count // dim, dim), (dim, 1))
