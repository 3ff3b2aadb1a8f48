"""Owns KV memory: which layers share a block table, the size of a block, and the tensors.

`scheduling.block_pool` tracks which requests hold a block. Block 0 of every group is the null
block: padded rows of block tables point at it, so no request ever gets it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...kernels.quant.latent_pages import page_bytes
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
    entry_tokens: int = 1  # tokens for each cached row
    block_tokens: int | None = None  # the most tokens of a block
    window_step: int = 1  # see `BlockGroup.sliding_window`

    @property
    def owners(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer for layer in self.layers if layer.kv_source is None)

    def block_size(self, largest: int) -> int:
        """Tokens of one block of this group, where blocks of other groups have `largest`."""
        return min(largest, self.block_tokens or largest)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of `block_size` tokens, over all layers of the group; `dtype` is the
        model's."""
        values = math.prod(self.shape(1, block_size))
        return values * (self.dtype or dtype).itemsize * len(self.owners)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """The shape of one layer's cache tensor, for blocks of `block_size` tokens."""
        rows, fp8 = block_size // self.entry_tokens, self.layers[0].fp8
        if fp8 is not None and fp8.paged:
            return num_blocks, 1, 1, page_bytes(rows, fp8.latent, fp8.rotary)
        page = (num_blocks, rows, self.num_kv_heads, self.head_dim)
        return page if self.is_mla else (2, *page)


def make_groups(layers: Sequence[AttentionLayer]) -> list[KVCacheGroup]:
    """Group the attention layers of target and drafter, in order of first appearance."""
    by_id = {layer.layer_id: layer for layer in layers}
    assert len(by_id) == len(layers), "layer ids are not unique"
    Key = tuple[int, int, bool, int | None, torch.dtype | None, int, int | None, int]
    members: dict[Key, list[AttentionLayer]] = {}
    for layer in layers:
        source = layer
        while source.kv_source is not None:
            source = by_id[source.kv_source]
        row = source.cache_row(source.head_dim)
        shape = (source.num_kv_heads, row, source.is_mla, source.sliding_window)
        blocks = (source.entry_tokens, source.block_tokens, source.window_step)
        key = (*shape, source.cache_dtype, *blocks)
        members.setdefault(key, []).append(layer)
    return [
        KVCacheGroup(
            index,
            tuple(sorted(group, key=lambda layer: layer.kv_source is not None)),
            *key,
        )
        for index, (key, group) in enumerate(members.items())
    ]


def fitting_block_size(wanted: int, groups: Sequence[KVCacheGroup]) -> int:
    """The least block size from `wanted` on that holds whole rows of every group's cache."""
    step = math.lcm(*(group.entry_tokens for group in groups))
    return -(-wanted // step) * step


@dataclass(frozen=True)
class StepLoad:
    """The most that steps hold at once; it bounds the live blocks of sliding windows."""

    num_reqs: int
    num_tokens: int


@dataclass(frozen=True)
class KVLayout:
    """The layout of a block. Both counting and allocating blocks use it, so that they agree.

    If some group is compressed, sliding windows would take most of the memory although few of their
    blocks are live. With `load`, such a group then gets twice the blocks that can be live.
    """

    groups: Sequence[KVCacheGroup]
    block_size: int  # tokens; a back end may need more than --block-size
    dtype: torch.dtype  # of the model, and of each group that has none of its own
    load: StepLoad | None = None

    @property
    def block_sizes(self) -> list[int]:
        """Tokens of a block, by group."""
        return [group.block_size(self.block_size) for group in self.groups]

    @property
    def block_bytes(self) -> int:
        """Bytes of `block_size` tokens in every group together."""
        return sum(group.block_bytes(self.block_size, self.dtype) for group in self.groups)

    @cached_property
    def _limits(self) -> list[int | None]:
        """The most blocks that a group can use, by group; None = no limit."""
        if self.load is None or all(group.entry_tokens == 1 for group in self.groups):
            return [None] * len(self.groups)
        limits: list[int | None] = []
        for group, size in zip(self.groups, self.block_sizes, strict=True):
            if group.sliding_window is None:
                limits.append(None)
                continue
            live = self.load.num_reqs * (-(-group.sliding_window // size) + 2)
            in_flight = -(-2 * self.load.num_tokens // size)  # of two steps
            limits.append(2 * (live + in_flight) + 1)
        return limits

    def counts(self, num_blocks: int) -> list[int]:
        """Blocks of each group, including the null block, if a group of `block_size` has
        `num_blocks`."""
        tokens = (num_blocks - 1) * self.block_size
        whole = [-(-tokens // size) + 1 for size in self.block_sizes]
        return [
            n if most is None else min(n, most) for n, most in zip(whole, self._limits, strict=True)
        ]

    def bytes_of(self, num_blocks: int) -> int:
        """Bytes of all groups, if a group of `block_size` has `num_blocks`."""
        parts = zip(self.groups, self.counts(num_blocks), self.block_sizes, strict=True)
        return sum(count * group.block_bytes(size, self.dtype) for group, count, size in parts)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks per group for this many tokens, including the null block."""
        return -(-num_tokens // self.block_size) + 1

    def blocks_in(self, memory_bytes: int) -> int:
        """Blocks per group that fit into `memory_bytes`, including the null block."""
        low, high = 0, 1 + memory_bytes // max(1, self._least_bytes)
        while low < high:
            middle = (low + high + 1) // 2
            if self.bytes_of(middle) <= memory_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def _least_bytes(self) -> int:
        """Bytes of a block in the groups without a limit."""
        free = [g for g, most in zip(self.groups, self._limits, strict=True) if most is None]
        return sum(group.block_bytes(self.block_size, self.dtype) for group in free)

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """Allocate a cache of `num_blocks` blocks per group, including the null block."""
        return KVCache(self.groups, num_blocks, self.block_size, self.dtype, device, self.load)


class KVCache:
    """The cache tensors of all groups; see `KVLayout` for their numbers of blocks."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        load: StepLoad | None = None,
    ) -> None:
        self.groups = list(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._layout = layout = KVLayout(groups, block_size, dtype, load)
        self.block_sizes = layout.block_sizes  # by group
        self.block_counts = layout.counts(num_blocks)  # by group
        self.layers = {layer.layer_id: layer for group in groups for layer in group.layers}
        self.group_of_layer = {
            layer.layer_id: group.index for group in groups for layer in group.layers
        }
        self.kv_caches: dict[int, Tensor] = {}  # by layer_id
        self._allocate(device)
        for layer in self.layers.values():
            source = layer
            while source.kv_source is not None:
                source = self.layers[source.kv_source]
            self.kv_caches[layer.layer_id] = self.kv_caches[source.layer_id]

    def _allocate(self, device: torch.device) -> None:
        """Allocate the cache of each layer that owns one, next to that of the layer it follows."""
        shapes: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
        for group, count, size in zip(
            self.groups, self.block_counts, self.block_sizes, strict=True
        ):
            shape, dtype = group.shape(count, size), group.dtype or self.dtype
            shapes |= {layer.layer_id: (shape, dtype) for layer in group.owners}
        behind = {layer.follows: layer.layer_id for layer in self.layers.values()}
        for layer_id, (shape, dtype) in shapes.items():
            if self.layers[layer_id].follows is not None:
                continue
            follower = behind.get(layer_id)
            if follower is None:
                self.kv_caches[layer_id] = zeros(shape, dtype, device)
                continue
            other, same = shapes[follower]
            assert same is dtype, "adjacent caches have one dtype"
            first, count = math.prod(shape), math.prod(other)
            both = zeros((first + count,), dtype, device)
            self.kv_caches[layer_id] = both[:first].view(shape)
            self.kv_caches[follower] = both[first:].view(other)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache, over all groups."""
        return self._layout.bytes_of(self.num_blocks)

    def attention_state(
        self, metadata: Sequence[AttentionMetadata], recurrent: RecurrentMetadata | None = None
    ) -> AttentionState:
        """The attention state of a forward pass; `metadata` has one entry per group."""
        layers, groups = self.layers, self.group_of_layer
        return AttentionState(metadata, layers, groups, self.kv_caches, recurrent)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not uninitialised memory: even a masked value that is NaN makes a weighted sum NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy gets zeroed pages from the system, which use no memory until they are touched.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
