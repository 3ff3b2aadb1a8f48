"""What the runner offers drafters with a model of their own: memory, attention, graphs.

A drafter's attention layers join the target's KV groups, so it needs no allocator of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from ...configs.schema import SpeculativeConfig
from ..attention.base import AttentionBuilder, AttentionLayer, AttentionState
from ..batch.kv_cache import KVCache
from ..batch.staging import StagingPool
from ..graphs.capture import GraphPool
from ..graphs.dispatch import GraphRole, descriptors, resolve_mode, thinned
from ..graphs.manager import CudaGraphManager
from ..graphs.settings import GraphSettings
from ..loading.weights import ResolvedModel
from .attention import DraftAttention
from .heads import FoundDrafter, load_head

logger = logging.getLogger(__name__)


class DraftModelHost:
    """Implements `speculators.base.DraftHost`. `attach` gives it the KV cache once that exists."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        vocab_size: int,
        target_model: nn.Module,
        num_target_layers: int,
        graphs: GraphSettings | None,
        target_resolved: ResolvedModel | None = None,
        drafter: FoundDrafter | None = None,  # whose files have been looked for
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.target_model = target_model
        self.target_resolved = target_resolved  # some targets bring their drafter along
        self._drafter = drafter
        self.draft_layers: list[AttentionLayer] = []
        self._next_layer_id = num_target_layers
        self._graphs = graphs
        self._attention: DraftAttention | None = None
        self._staging = StagingPool(device)

    def upload(self, array: np.ndarray) -> Tensor:
        """A host array of int32 or int64 on the device, without a wait."""
        return self._staging.upload(array)

    def load_draft_model(self, kind: str, speculative: SpeculativeConfig) -> nn.Module:
        """Build the draft architecture `kind`, load its weights, register its attention layers."""
        layer_id = self._next_layer_id
        model: Any = load_head(kind, speculative, self, layer_id, self._drafter)
        layers = model.attention_layers()
        self.draft_layers += layers
        self._next_layer_id += len(layers)
        loaded: nn.Module = model
        return loaded

    def attach(
        self,
        cache: KVCache,
        builders: Sequence[AttentionBuilder | None],  # by group; None = no draft layers
        target_builders: Sequence[AttentionBuilder],  # by group; draft prefill reuses their work
        block_tables: Sequence[Tensor],  # the request table's, per group [R, max_blocks_g] int32
    ) -> None:
        """Tell it where KV lives; from then on `build_draft_attention` works."""
        self._prefill_support = min(builder.supports for builder in target_builders)
        self._attention = DraftAttention(
            cache,
            builders,
            block_tables,
            self.max_num_reqs,
            self.max_num_tokens,
            self.max_model_len,
            self.device,
        )

    def build_draft_attention(
        self,
        num_reqs: int,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        idx_mapping: Tensor,
        desc: BatchExecutionDescriptor | None,
        for_capture: bool = False,
        writes_kv: bool = True,
        query_lens: Sequence[int] | None = None,
    ) -> AttentionState:
        """An AttentionState for draft decodes of one token per request, or of `query_lens` [N].

        KV slots come from `positions` (-1 = write nothing), or are all -1 for a drafter that only
        reads.
        query_start_loc [N* + 1] int32 = min(i, N); seq_lens [N*] int32, padded 0; positions [N*]
        int64; idx_mapping [N*] int32, padded -1. `num_reqs` is N. With `query_lens`, N* = N,
        query_start_loc holds their sums and positions has a row for every token. Waits for nothing.
        """
        assert self._attention is not None, "the drafter asked for attention before the KV cache"
        return self._attention.build(
            num_reqs,
            query_start_loc,
            seq_lens,
            positions,
            idx_mapping,
            desc,
            for_capture,
            writes_kv,
            query_lens,
        )

    def stage_draft_tables(self, num_reqs: int, rows: int, idx_mapping: Tensor) -> None:
        """Bring this step's block tables to where `attention_on_device` reads them; a graph may."""
        assert self._attention is not None
        self._attention.gather_tables(num_reqs, rows, idx_mapping)

    def attention_on_device(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        desc: BatchExecutionDescriptor,
        writes_kv: bool = True,
    ) -> Callable[[], AttentionState]:
        """For capture: each call builds the attention of one more draft decode, by operations of
        the device alone, from what these buffers hold then. Shapes as in `build_draft_attention`.
        """
        assert self._attention is not None
        return self._attention.on_device(query_start_loc, seq_lens, positions, desc, writes_kv)

    @property
    def draft_decodes_on_device(self) -> bool:
        """Whether `attention_on_device` can be used, so that one graph holds several decodes."""
        assert self._attention is not None
        wanted = self._graphs is not None and self._graphs.draft_loop
        return wanted and self._attention.builds_on_device

    def create_graph_manager(
        self,
        name: str,
        mode: CUDAGraphMode,
        uniform_token_counts: Sequence[int],
        label: str | None = None,
        few_sizes: bool = False,
    ) -> CudaGraphManager:
        """A manager that shares the device's graph pool.

        `name` is the role, "draft prefill" or "draft decode"; it gets of `mode` what the attention
        back end can do in that role. `label` is what logs call it, if not by its role. With
        `few_sizes` it captures about two for each doubling.
        """
        assert self._graphs is not None or mode is CUDAGraphMode.NONE, "this device has no graphs"
        if self._graphs is None:
            from ..graphs.recorder import RecordedGraphs

            return CudaGraphManager(name, [], GraphPool(RecordedGraphs()))
        role = GraphRole(name)
        decodes = role is GraphRole.DRAFT_DECODE
        support = self.draft_decode_support if decodes else self._prefill_support
        decision = resolve_mode(mode, support, role, uniform_token_counts)
        if decision.reason:
            logger.warning("%s graphs run as %s: %s", name, decision.mode.name, decision.reason)
        graphs = self._graphs
        wanted = descriptors(
            decision.mode,
            decision.uniform_token_counts,
            graphs.sizes,
            self.max_num_reqs,
            self.max_num_tokens,
            graphs.mixed_sizes,
        )
        if few_sizes and wanted:
            wanted = sorted(thinned(wanted[::-1]), key=lambda desc: -desc.num_tokens)
        return CudaGraphManager(
            label or name, wanted, graphs.pool, graphs.progress, graphs.debug_compare_eager
        )

    @property
    def draft_decode_support(self) -> AttentionCGSupport:
        """The least claim of the draft builders."""
        assert self._attention is not None
        return self._attention.support
