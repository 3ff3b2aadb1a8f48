"""FlashMLA's sparse kernel for DeepSeek V4: each token attends to listed rows of a 16-bit cache.

The kernel reads rows of one tensor, so a layer's raw rows and its entries lie side by side in
memory (`AttentionLayer.follows`). It plans nothing: a pass prepares lists of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...configs.graphs import BatchExecutionDescriptor
from ...kernels.attention.compressed.pages import Pages, SlotList
from .base import CommonAttentionMetadata, SparseAttend
from .compressed import CompressedBuilder, CompressedMetadata

DIM = 512  # of a row
HEADS = (64, 128)  # numbers of heads that the kernel supports
_ROWS = 128  # the number of listed rows must be a multiple

# `flash_mla.flash_mla_sparse_fwd`
SparseForward = Callable[..., tuple[Tensor, Any, Any]]


class _Pass:
    """The attention of one pass. Layers that read the same lists share the joined one."""

    def __init__(self, forward: SparseForward) -> None:
        self._forward = forward
        # (lists, kept so that their ids stay theirs; joined)
        self._joined: dict[tuple[int, int], tuple[tuple[SlotList, SlotList | None], Tensor]] = {}

    def __call__(
        self,
        query: Tensor,
        raw: Pages,
        window: SlotList,
        entries: Pages | None,
        chosen: SlotList | None,
        sinks: Tensor,
        scale: float,
    ) -> Tensor:
        """See `kernels.attention.compressed.sparse_attention.sparse_attention`."""
        rows = raw.rows if entries is None else joined_rows(raw, entries)
        key = (id(window), id(chosen))
        if key not in self._joined:
            listed = joined_slots(window, chosen, raw.rows.shape[0])
            self._joined[key] = ((window, chosen), listed)
        out: Tensor = self._forward(
            query, rows.unsqueeze(1), self._joined[key][1], scale, rows.shape[1],
            attn_sink=sinks, use_legacy=True, return_log2_lse=False,
        )[0]  # fmt: skip
        return out


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


class FlashSparseMetadata(CompressedMetadata):
    """Views of the step buffers of one KV group, for FlashMLA's kernel."""

    def __init__(
        self, common: CommonAttentionMetadata, block_size: int, forward: SparseForward
    ) -> None:
        super().__init__(common, block_size)
        self._forward = forward

    def create_attend(self) -> SparseAttend:
        """See `CompressedRows.create_attend`."""
        return _Pass(self._forward)


class FlashSparseBuilder(CompressedBuilder):
    """Keeps nothing between steps, and nothing waits for the device."""

    def __init__(self, block_size: int, forward: SparseForward) -> None:
        super().__init__(block_size, in_graphs=True)
        self._forward = forward

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> FlashSparseMetadata:
        return FlashSparseMetadata(common, self._block_size, self._forward)
