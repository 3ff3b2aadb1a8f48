"""The attention interface: what a back end builds per step, and what a model calls per layer.

A model's forward pass gets an `AttentionState` as an argument and calls `attend` for each layer.
A builder owns persistent buffers and writes to them in place, because graphs bake their addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor
from ...kernels.attention.compressed.pages import Pages
from ...kernels.attention.paged_rows import AttentionRule
from ...kernels.attention.rotary_store_kv import rotary_qkv
from ...kernels.linear.norm_rope import rotary_embedding
from ...kernels.linear.rotation import Rotation
from ...kernels.recurrent.rows import DeltaWeights, OutputGate
from .recurrent import RecurrentMetadata


@dataclass(frozen=True)
class AttentionLayer(AttentionRule):
    """The constants of one attention layer. `layer_id` is unique across target and drafter."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_source: int | None = None  # layer_id of the layer whose cache this one reads; it writes none
    entry_tokens: int = 1  # tokens for each cached row: above 1, rows are compressed
    block_tokens: int | None = None  # the most tokens of a block; None = no limit
    follows: int | None = None  # layer_id of the layer whose cache lies right before this one's
    window_step: int = 1  # this many neighbouring queries see rows from the same position on
    attends: bool = True  # False: cached rows that another layer's attention reads
    rotary_tail: int | None = None  # of DeepSeek V4's rows: the last values, which are rotated
    reads_lists: bool = False  # attends to listed rows alone, which an indexer chooses

    @property
    def is_compressed(self) -> bool:
        """True for the layers of DeepSeek's sparse attention: those that read listed rows (V3.2's
        latent rows; V4's raw rows, which are both key and value), and the caches beside them."""
        if self.reads_lists or not self.attends:
            return True
        return self.is_mla and self.head_dim == self.head_dim_v


@dataclass(frozen=True)
class Rotary(Rotation):
    """The rotary embedding of a layer's query and key, which a back end may fuse with its KV
    write."""

    def prepare(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rotate query and key; return query, key and value for `attend`.

        They may also be given as S float32 partial sums, [S, M, heads, D].
        """
        if key is None or value is None or (query.dim() == 3 and self.norms is None):
            assert self.norms is None
            return *self.rotate(query, key), value
        return rotary_qkv(query, key, value, self, dtype)

    def rotate(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rotate query [M, Hq, D] and key [M, Hkv, D], which are the first M token rows."""
        return rotary_embedding(query, key, self)


class CompressedRows(Protocol):
    """One KV group in a pass of a model with compressed caches."""

    common: CommonAttentionMetadata

    def pages(self, layer: AttentionLayer, kv_cache: Tensor) -> Pages:
        """A layer's cache in this group."""

    def create_attend(self) -> SparseAttend:
        """The attention function of one pass; what it plans is valid for that pass alone."""


# `kernels.attention.compressed.sparse_attention.sparse_attention`, or a function like it.
SparseAttend = Callable[..., Tensor]


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step's batch as every back end sees it, for one KV group, with padded rows.

    Padded requests have query length 0 and `seq_lens` 0; padded tokens have slot -1.
    """

    num_reqs: int  # N*, including padding
    num_actual_tokens: int  # M*, token rows
    max_query_len: int
    max_seq_len: int  # upper bound
    query_start_loc: Tensor  # [N* + 1] int32, non-decreasing; padded entries repeat the last
    query_start_loc_cpu: Tensor  # the same on the host
    seq_lens: Tensor  # [N*] int32, tokens in the KV cache once this step has written its own
    seq_lens_cpu_upper_bound: Tensor  # [N*] int32
    block_table: Tensor  # [N*, max_blocks] int32
    slot_mapping: Tensor  # [M*] int64, -1 = do not write
    max_decode_len: int = 1  # the most new tokens of a request that decodes or verifies in any step

    def with_rows(self, num_reqs: int, num_tokens: int) -> CommonAttentionMetadata:
        """Cut every field to its first `num_reqs` requests and `num_tokens` tokens."""
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
    """The attention of one KV group in one forward pass."""

    # False if the step differs from what its FULL graph has baked; it then runs eagerly, padded.
    can_replay: bool = True
    # True if `rotate_and_attend` saves work over a rotation and `attend`. PIECEWISE graphs then
    # leave the rotation to it; otherwise they contain the rotation.
    fuses_rotation: bool = False

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,  # [M*, num_heads, head_dim]
        key: Tensor | None,  # [M*, num_kv_heads, head_dim]; None = read only
        value: Tensor | None,  # [M*, num_kv_heads, head_dim_v]; None for MLA and read only
        # [2, num_blocks, block_size, num_kv_heads, head_dim], e4m3 if the layer says so; MLA: no
        # first 2, and packed rows if e4m3
        kv_cache: Tensor,
    ) -> Tensor:  # [M*, num_heads, head_dim_v]
        """Write key and value into the cache at this step's slots, then attend over the cache."""

    def compressed(self) -> CompressedRows:
        """The step's rows as models with compressed caches read them (`is_compressed`)."""
        raise AssertionError(f"{type(self).__name__} has no compressed caches")

    def rotate_and_attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        rotary: Rotary,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rotate query and key, then `attend`; the result is written into `out` if it is given.

        A back end with a fused kernel overrides it.
        """
        dtype = layer.dtype_of(kv_cache)
        query, key, value = rotary.prepare(query, key, value, dtype)
        result = self.attend(layer, query, key, value, kv_cache)
        return result if out is None else out.copy_(result)


class AttentionBuilder(ABC):
    """Builds the metadata of one KV group. Target and drafter have separate builders."""

    supports: AttentionCGSupport  # which batches work in graphs; `claims` tests it at start-up
    # True if `build` for a uniform batch only launches device work and bakes nothing of a step but
    # its bounds. Then a graph may contain it, together with a whole step or all draft decodes of
    # one. It must always write to the same addresses: the drafter's graph reads what the target's
    # graph built, through a state made before the capture.
    builds_on_device: bool = False

    @abstractmethod
    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> AttentionMetadata:
        """Build this step's metadata. With a FULL `desc`, update the buffers that its graph
        reads."""

    def build_for_capture(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor
    ) -> AttentionMetadata:
        """Build new metadata for a warm-up or a capture. The two must not share it."""
        return self.build(common, desc)


@dataclass(frozen=True)
class BuilderSizes:
    """What a builder is made for: the blocks of its KV group, the largest step, and its tensors."""

    block_size: int
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device


class AttentionBackend(ABC):
    """A family of attention kernels. `name` is its value for `--attention-backend`."""

    name: str
    batch_invariant = False  # set before `create_builder` for `--batch-invariant`

    @classmethod
    def block_size(cls, wanted: int) -> int:
        """The block size that this back end uses if `--block-size` is `wanted`."""
        return wanted

    @classmethod
    @abstractmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        """A phrase that says why it cannot run these layers on this device; None if it can."""

    @abstractmethod
    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> AttentionBuilder:
        """Create the builder of one KV group, with workspaces for the largest step."""


@dataclass(frozen=True)
class AttentionState:
    """The attention of one forward pass over all KV groups, passed to the model as an argument."""

    metadata: Sequence[AttentionMetadata]  # by group
    layers: Mapping[int, AttentionLayer]  # by layer_id
    group_of_layer: Mapping[int, int]  # layer_id -> group
    kv_caches: Mapping[int, Tensor]  # by layer_id; layers that share KV map to the same tensor
    recurrent: RecurrentMetadata | None = None  # None: no recurrent layer runs

    @property
    def can_replay(self) -> bool:
        """False if the step must run eagerly although its descriptor is FULL."""
        # A group without a layer of the drafter has no metadata (None) in the drafter's state.
        return all(one.can_replay for one in self.metadata if one is not None)

    def attend(
        self, layer_id: int, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        metadata = self.metadata[self.group_of_layer[layer_id]]
        return metadata.attend(self.layers[layer_id], query, key, value, self.kv_caches[layer_id])

    def recur(self, layer_id: int, x: Tensor, weights: DeltaWeights, gate: OutputGate) -> Tensor:
        """`RecurrentMetadata.recur` of one recurrent layer: [M*, channels] -> [M*, value size]."""
        assert self.recurrent is not None, "the pass has no recurrent states"
        return self.recurrent.recur(layer_id, x, weights, gate)

    def rotate_and_attend(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rotary: Rotary,
        out: Tensor | None = None,
    ) -> Tensor:
        metadata = self.metadata[self.group_of_layer[layer_id]]
        return metadata.rotate_and_attend(
            self.layers[layer_id], query, key, value, self.kv_caches[layer_id], rotary, out
        )

    def compressed(self, layer_id: int) -> CompressedRows:
        return self.metadata[self.group_of_layer[layer_id]].compressed()

    def pages(self, layer_id: int) -> Pages:
        rows = self.compressed(layer_id)
        return rows.pages(self.layers[layer_id], self.kv_caches[layer_id])


@dataclass(frozen=True)
class AttentionStatePair:
    """Two independent states of one descriptor: one for the eager warm-up run, one for the
    capture."""

    warmup: AttentionState
    captured: AttentionState
