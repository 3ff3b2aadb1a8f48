"""Owns KV memory: which layers share a block table, how large a block is, and the tensors.

Who owns a block is the business of `block_pool`. Block 0 of every group is the null block: padded
block-table rows point at it, so it is never handed to a request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention.base import AttentionLayer, AttentionMetadata, AttentionState


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers of one shape and window; they share a block table. `layers[0]` stands for all."""

    index: int
    layers: tuple[AttentionLayer, ...]  # readers included
    num_kv_heads: int
    head_dim: int
    is_mla: bool
    sliding_window: int | None

    @property
    def owners(self) -> tuple[AttentionLayer, ...]:
        """Layers that have a cache of their own."""
        return tuple(layer for layer in self.layers if layer.kv_source is None)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers of the group."""
        values = block_size * self.num_kv_heads * self.head_dim * (1 if self.is_mla else 2)
        return values * dtype.itemsize * len(self.owners)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's tensor."""
        page = (num_blocks, block_size, self.num_kv_heads, self.head_dim)
        return page if self.is_mla else (2, *page)


def make_groups(layers: Sequence[AttentionLayer]) -> list[KVCacheGroup]:
    """Group the attention layers of target and drafter, in order of first appearance."""
    by_id = {layer.layer_id: layer for layer in layers}
    assert len(by_id) == len(layers), "layer ids are not unique"
    members: dict[tuple[int, int, bool, int | None], list[AttentionLayer]] = {}
    for layer in layers:
        source = layer
        while source.kv_source is not None:
            source = by_id[source.kv_source]
        key = (source.num_kv_heads, source.head_dim, source.is_mla, source.sliding_window)
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
    """What a block holds. Blocks are counted and allocated by the same layout, so that the cache
    never takes more memory than it was counted for."""

    groups: Sequence[KVCacheGroup]
    block_size: int  # tokens; the attention back end's, which may be larger than --block-size
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in every group together."""
        return sum(group.block_bytes(self.block_size, self.dtype) for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks per group that hold this many tokens, and the null block."""
        return -(-num_tokens // self.block_size) + 1

    def blocks_in(self, memory_bytes: int) -> int:
        """Blocks per group that fit into `memory_bytes`, the null block included."""
        return memory_bytes // max(1, self.block_bytes)

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """A cache of `num_blocks` blocks per group, the null block included."""
        return KVCache(self.groups, num_blocks, self.block_size, self.dtype, device)


class KVCache:
    """The tensors of all groups, each with the same number of blocks (equal token capacity)."""

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
                self.kv_caches[layer.layer_id] = _zeros(shape, dtype, device)
        for layer in self.layers.values():
            source = layer
            while source.kv_source is not None:
                source = self.layers[source.kv_source]
            self.kv_caches[layer.layer_id] = self.kv_caches[source.layer_id]

    @property
    def num_bytes(self) -> int:
        """Of all groups together."""
        return self.num_blocks * KVLayout(self.groups, self.block_size, self.dtype).block_bytes

    def attention_state(self, metadata: Sequence[AttentionMetadata]) -> AttentionState:
        """The state a model's forward pass takes; `metadata` is by group."""
        return AttentionState(metadata, self.layers, self.group_of_layer, self.kv_caches)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: a masked key of garbage NaN would still poison a weighted sum."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages, which cost nothing until they are used.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
