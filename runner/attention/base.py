"""The attention interface: what a back end builds per step, and what a model calls per layer.

A model's forward pass takes one `AttentionState` as an argument and calls `attend` per layer; there
is no global. A builder owns persistent buffers and *writes in place*: graphs bake addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor
from ...kernels.attention.rotary_store_kv import HeadNorms, rotary_qkv
from ...kernels.linear.norm_rope import rotary_embedding


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer's constants. `layer_id` is unique over target and drafter."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    head_dim_v: int | None = None  # None = head_dim
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None
    is_mla: bool = False  # one cached row of head_dim; V is its first head_dim_v values
    kv_source: int | None = None  # layer_id whose cache this layer reads; it writes none
    sinks: Tensor | None = None  # [num_heads] per-head sink logits


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding that a back end may fuse with its KV write."""

    positions: Tensor  # [M*] int64
    cos_sin_cache: Tensor  # [max_position, rot_dim]
    interleaved: bool = False
    norms: HeadNorms | None = None  # of query and key heads, before they are rotated

    def prepare(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Query, key and value for `attend`; they may be float32 parts [S, M, heads, D]."""
        if key is None or value is None or (query.dim() == 3 and self.norms is None):
            assert self.norms is None
            return *self.rotate(query, key), value
        positions = self.positions[: query.shape[-3]]
        table, norms = self.cos_sin_cache, self.norms
        return rotary_qkv(positions, query, key, value, table, dtype, self.interleaved, norms)

    def rotate(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """query [M, Hq, D] and key [M, Hkv, D], rotated; M rows from the first on."""
        positions = self.positions[: query.shape[0]]
        return rotary_embedding(positions, query, key, self.cos_sin_cache, self.interleaved)


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """What every back end needs of one step, for one KV group; rows are padded to one count.

    Padded requests have query length 0 and `seq_lens` 0, padded tokens have slot -1 (spec 1.6).
    """

    num_reqs: int  # N*, rows of the tensors below
    num_actual_tokens: int  # M*, token rows
    max_query_len: int
    max_seq_len: int  # a bound, not necessarily reached
    query_start_loc: Tensor  # [N* + 1] int32, non-decreasing; padded entries repeat the last
    query_start_loc_cpu: Tensor  # the same on the host
    seq_lens: Tensor  # [N*] int32, cached tokens including this step's
    seq_lens_cpu_upper_bound: Tensor  # [N*] int32
    block_table: Tensor  # [N*, max_blocks] int32
    slot_mapping: Tensor  # [M*] int64, -1 = do not write

    def with_rows(self, num_reqs: int, num_tokens: int) -> CommonAttentionMetadata:
        """The first `num_reqs` requests and `num_tokens` tokens of every row-indexed field."""
        return replace(
            self,
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=self.seq_lens_cpu_upper_bound[:num_reqs],
            block_table=self.block_table[:num_reqs],
            slot_mapping=self.slot_mapping[:num_tokens],
        )


class AttentionMetadata(ABC):
    """One KV group's attention for one forward pass."""

    # False if this step does not fit what its FULL graph has baked: run it eagerly, padded.
    can_replay: bool = True

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,  # [M*, num_heads, head_dim]
        key: Tensor | None,  # [M*, num_kv_heads, head_dim]; None = read only
        value: Tensor | None,  # [M*, num_kv_heads, head_dim_v]; None for MLA and read only
        kv_cache: Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]; MLA: no first 2
    ) -> Tensor:  # [M*, num_heads, head_dim_v]
        """Write key and value at the slots of this step, then attend over the cache."""

    def rotate_and_attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        rotary: Rotary,
    ) -> Tensor:
        """`attend` after rotating query and key; a back end with a fused kernel overrides it."""
        query, key, value = rotary.prepare(query, key, value, kv_cache.dtype)
        return self.attend(layer, query, key, value, kv_cache)


class AttentionBuilder(ABC):
    """Builds one KV group's metadata; one builder per group and role (target, draft)."""

    supports: AttentionCGSupport  # verified by tests, see design 3.5
    # `build` for a uniform batch launches device work only and bakes nothing of a step but its
    # bounds: a graph may hold it, and with it a whole step, or all draft decodes of one. What it
    # writes is always in the same place: the drafter's graph of the step, whose state was made
    # before its capture, reads what the target's graph has built.
    builds_on_device: bool = False

    @abstractmethod
    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> AttentionMetadata:
        """Metadata for this step. With a FULL `desc`, updates in place what its graph has baked."""

    def build_for_capture(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor
    ) -> AttentionMetadata:
        """Fresh, unplanned metadata for a warm-up or a capture; never shared between the two."""
        return self.build(common, desc)


class AttentionBackend(ABC):
    """A family of kernels. `name` is the value of `--attention-backend`."""

    name: str

    @classmethod
    def block_size(cls, wanted: int) -> int:
        """Tokens per KV block that this back end needs, where `--block-size` asks for `wanted`."""
        return wanted

    @classmethod
    @abstractmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        """None if it can run these layers on this device, else one sentence that says why not."""

    @abstractmethod
    def create_builder(
        self,
        layers: Sequence[AttentionLayer],
        block_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionBuilder:
        """The builder of one KV group; allocates its workspaces at their maximum size."""


@dataclass(frozen=True)
class AttentionState:
    """Attention of one forward pass over all KV groups; handed to the model as an argument."""

    metadata: Sequence[AttentionMetadata]  # by group
    layers: Mapping[int, AttentionLayer]  # by layer_id
    group_of_layer: Mapping[int, int]  # layer_id -> group
    kv_caches: Mapping[int, Tensor]  # by layer_id; a KV-shared layer maps to its source's tensor

    @property
    def can_replay(self) -> bool:
        """False if the step must run eagerly although its descriptor is FULL."""
        # A group of which a drafter uses no layer has no metadata.
        return all(one.can_replay for one in self.metadata if one is not None)

    def attend(
        self, layer_id: int, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        """Store and attend for one layer; shapes as in `AttentionMetadata.attend`."""
        metadata = self.metadata[self.group_of_layer[layer_id]]
        return metadata.attend(self.layers[layer_id], query, key, value, self.kv_caches[layer_id])

    def rotate_and_attend(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rotary: Rotary,
    ) -> Tensor:
        """`attend` on query and key that are not rotated yet."""
        metadata = self.metadata[self.group_of_layer[layer_id]]
        return metadata.rotate_and_attend(
            self.layers[layer_id], query, key, value, self.kv_caches[layer_id], rotary
        )


@dataclass(frozen=True)
class AttentionStatePair:
    """Two independent states of one descriptor: one ran eagerly, one was recorded (design 3.4)."""

    warmup: AttentionState
    captured: AttentionState
