"""Owns KV memory: which layers share a block table, the size of a block, and the tensors.

`scheduling.block_pool` tracks which requests hold a block. Block 0 of every group is the null
block: padded rows of block tables point at it, so no request ever gets it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention.base import AttentionLayer, AttentionMetadata, AttentionState
from ..attention.recurrent import RecurrentMetadata


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers of equal cache shape and window, which share a block table."""

    index: int
    layers: tuple[AttentionLayer, ...]  # including those that only read another layer's cache
    num_kv_heads: int
    head_dim: int  # elements of one cached row of a head; bytes if the row is packed
    is_mla: bool
    sliding_window: int | None
    dtype: torch.dtype | None = None  # of the cache; None = that of the model

    @property
    def owners(self) -> tuple[AttentionLayer, ...]:
        """The layers that have a cache of their own."""
        return tuple(layer for layer in self.layers if layer.kv_source is None)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, over all layers of the group; `dtype` is the model's."""
        values = block_size * self.num_kv_heads * self.head_dim * (1 if self.is_mla else 2)
        return values * (self.dtype or dtype).itemsize * len(self.owners)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """The shape of one layer's cache tensor."""
        page = (num_blocks, block_size, self.num_kv_heads, self.head_dim)
        return page if self.is_mla else (2, *page)


def make_groups(layers: Sequence[AttentionLayer]) -> list[KVCacheGroup]:
    """Group the attention layers of target and drafter, in order of first appearance."""
    by_id = {layer.layer_id: layer for layer in layers}
    assert len(by_id) == len(layers), "layer ids are not unique"
    members: dict[tuple[int, int, bool, int | None, torch.dtype | None], list[AttentionLayer]] = {}
    for layer in layers:
        source = layer
        while source.kv_source is not None:
            source = by_id[source.kv_source]
        row, dtype = source.cache_row(source.head_dim), source.cache_dtype
        key = (source.num_kv_heads, row, source.is_mla, source.sliding_window, dtype)
        members.setdefault(key, []).append(layer)
    return [
        KVCacheGroup(
            index,
            tuple(sorted(group, key=lambda layer: layer.kv_source is not None)),
            *key,
        )
        for index, (key, group) in enumerate(members.items())
    ]


@dataclass(frozen=True)
class KVLayout:
    """The layout of a block. Both counting and allocating blocks use it, so that they agree."""

    groups: Sequence[KVCacheGroup]
    block_size: int  # tokens; a back end may need more than --block-size
    dtype: torch.dtype  # of the model, and of each group that has none of its own

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in every group together."""
        return sum(group.block_bytes(self.block_size, self.dtype) for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks per group for this many tokens, including the null block."""
        return -(-num_tokens // self.block_size) + 1

    def blocks_in(self, memory_bytes: int) -> int:
        """Blocks per group that fit into `memory_bytes`, including the null block."""
        return memory_bytes // max(1, self.block_bytes)

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """Allocate a cache of `num_blocks` blocks per group, including the null block."""
        return KVCache(self.groups, num_blocks, self.block_size, self.dtype, device)


class KVCache:
    """The cache tensors of all groups. Every group has the same number of blocks."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = list(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.layers = {layer.layer_id: layer for group in groups for layer in group.layers}
        self.group_of_layer = {
            layer.layer_id: group.index for group in groups for layer in group.layers
        }
        self.kv_caches: dict[int, Tensor] = {}  # by layer_id
        for group in groups:
            shape = group.shape(num_blocks, block_size)
            for layer in group.owners:
                own = group.dtype or dtype
                self.kv_caches[layer.layer_id] = _zeros(shape, own, device)
        for layer in self.layers.values():
            source = layer
            while source.kv_source is not None:
                source = self.layers[source.kv_source]
            self.kv_caches[layer.layer_id] = self.kv_caches[source.layer_id]

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache, over all groups."""
        return self.num_blocks * KVLayout(self.groups, self.block_size, self.dtype).block_bytes

    def attention_state(
        self, metadata: Sequence[AttentionMetadata], recurrent: RecurrentMetadata | None = None
    ) -> AttentionState:
        """The attention state of a forward pass; `metadata` has one entry per group."""
        layers, groups = self.layers, self.group_of_layer
        return AttentionState(metadata, layers, groups, self.kv_caches, recurrent)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not uninitialised memory: even a masked value that is NaN makes a weighted sum NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy gets zeroed pages from the system, which use no memory until they are touched.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
