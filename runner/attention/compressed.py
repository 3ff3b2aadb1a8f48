"""Attention to listed rows (DeepSeek V3.2 and V4), in plain torch or by Triton kernels.

The model launches what compresses and selects entries; a group's metadata offers it the step's
tables and slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor
from ...kernels.attention.compressed.pages import (
    Pages,
    TokenRows,
    entry_slots,
    requests_of,
    window_slots,
)
from ...kernels.attention.compressed.sparse_attention import sparse_attention
from ...kernels.attention.compressed.store_rows import store_rows
from .base import (
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    CommonAttentionMetadata,
    SparseAttend,
)


class CompressedMetadata(AttentionMetadata):
    """Views of the step buffers of one KV group."""

    def __init__(
        self,
        common: CommonAttentionMetadata,
        block_size: int,
        create_attend: Callable[[], SparseAttend],
    ) -> None:
        self.common, self._block_size, self.create_attend = common, block_size, create_attend

    def compressed(self) -> CompressedMetadata:
        return self

    def pages(self, layer: AttentionLayer, kv_cache: Tensor) -> Pages:
        common = self.common
        return Pages(
            kv_cache,
            common.block_table,
            common.slot_mapping,
            self._block_size,
            layer.entry_tokens,
            layer.fp8,
        )

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        """Attend to all rows of the layer's window: without an indexer or a compressor."""
        pages = self.pages(layer, kv_cache)
        if key is not None:
            store_rows(key, pages)
        if layer.sliding_window is None:
            listed = entry_slots(pages, self._tokens(), self.common.max_seq_len)
        else:
            listed = window_slots(pages, self._tokens(), layer.sliding_window)
        attend, size = self.create_attend(), layer.head_dim_v
        return attend(query, pages, listed, None, None, layer.sinks, layer.scale, size)

    def _tokens(self) -> TokenRows:
        """The token rows with the positions that `seq_lens` implies."""
        common = self.common
        requests = requests_of(common.query_start_loc, common.num_actual_tokens)
        each = torch.arange(common.num_actual_tokens, device=requests.device)
        ends = common.query_start_loc[1:][requests]
        positions = common.seq_lens[requests] - ends + each
        return TokenRows(positions.clamp(min=0), requests)


class CompressedBuilder(AttentionBuilder):
    """Keeps nothing between steps. With kernels (`in_graphs`) nothing waits for the device."""

    def __init__(
        self,
        block_size: int,
        create_attend: Callable[[], SparseAttend] = lambda: sparse_attention,
        in_graphs: bool = True,
    ) -> None:
        self._block_size, self._create_attend = block_size, create_attend
        self.supports = AttentionCGSupport.ALWAYS if in_graphs else AttentionCGSupport.NEVER
        self.builds_on_device = in_graphs

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> CompressedMetadata:
        return CompressedMetadata(common, self._block_size, self._create_attend)
