"""What the runner offers drafters with a model of their own: memory, attention, graphs.

A drafter's attention layers join the target's KV groups, so it needs no allocator of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from ..configs.schema import ModelConfig, SpeculativeConfig
from ..kernels.gather_batch import compute_slot_mappings, gather_block_tables
from .attention.base import (
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    AttentionState,
    CommonAttentionMetadata,
)
from .cuda_graphs import CudaGraphManager, ProgressFn
from .graph_capture import GraphPool
from .graph_dispatch import GraphRole, resolve_mode
from .kv_cache import KVCache
from .staging import StagingPool
from .weights import ResolvedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphSettings:
    """What every graph manager of this device shares."""

    pool: GraphPool
    sizes: tuple[int, ...]
    debug_compare_eager: bool = False
    progress: ProgressFn | None = None


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
        dtype_name: str,
        graphs: GraphSettings | None,
        target_resolved: ResolvedModel | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.target_model = target_model
        self.target_resolved = target_resolved  # some targets bring their drafter along
        self.draft_layers: list[AttentionLayer] = []
        self._next_layer_id = num_target_layers
        self._dtype_name = dtype_name
        self._graphs = graphs
        self._attention: _DraftAttention | None = None
        self._staging = StagingPool(device)

    def upload(self, array: np.ndarray) -> Tensor:
        """A host array of int32 or int64 on the device, without a wait."""
        return self._staging.upload(array)

    def load_draft_model(self, kind: str, speculative: SpeculativeConfig) -> nn.Module:
        """Build the draft architecture `kind`, load its weights, register its attention layers."""
        if kind == "draft_model":
            model: Any = self._load_whole_model(speculative)
        else:
            from .draft_heads import load_head

            model = load_head(kind, speculative, self, self._next_layer_id)
        layers = model.attention_layers()
        self.draft_layers += layers
        self._next_layer_id += len(layers)
        loaded: nn.Module = model
        return loaded

    def _load_whole_model(self, speculative: SpeculativeConfig) -> nn.Module:
        from .errors import ModelLoadError
        from .layers import resolve_format
        from .models.registry import build_model
        from .weights import load_weights, resolve_model

        if speculative.model is None:
            raise ModelLoadError("speculative method draft_model needs a model.")
        resolved = resolve_model(
            ModelConfig(
                model=speculative.model,
                dtype=self._dtype_name,
                load_format=speculative.load_format,
                device=self.device.type,
            )
        )
        vocab_size = int(resolved.text_config.vocab_size)
        if vocab_size != self.vocab_size:
            raise ModelLoadError(
                f"the draft model's vocabulary has {vocab_size} tokens, the target's "
                f"{self.vocab_size}: they do not share a tokenizer."
            )
        fmt = resolve_format(self._dtype_name, self.device, resolved.checkpoint_dtype)
        model = build_model(
            resolved.hf_config,
            self.device,
            fmt.dtype,
            layer_id_offset=self._next_layer_id,
            pack_fp16=fmt.pack_fp16,
            max_position=self.max_model_len,
            linear=getattr(self.target_model.format, "linear", None),
        )
        load_weights(model, resolved)
        return model

    def attach(
        self,
        cache: KVCache,
        builders: Sequence[AttentionBuilder | None],  # by group; None = no draft layers
        target_builders: Sequence[AttentionBuilder],  # by group; draft prefill reuses their work
        block_tables: Sequence[Tensor],  # the request table's, per group [R, max_blocks_g] int32
    ) -> None:
        """Tell it where KV lives; from then on `build_draft_attention` works."""
        self._prefill_support = min(builder.supports for builder in target_builders)
        self._attention = _DraftAttention(
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

        KV slots come from `positions`, or are all -1 for a drafter that only reads.
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

    def create_graph_manager(
        self, name: str, mode: CUDAGraphMode, uniform_token_counts: Sequence[int]
    ) -> CudaGraphManager:
        """A manager that shares the device's graph pool.

        `name` is the role, "draft prefill" or "draft decode"; it gets of `mode` what the attention
        back end can do in that role.
        """
        assert self._graphs is not None or mode is CUDAGraphMode.NONE, "this device has no graphs"
        if self._graphs is None:
            from .graph_recorder import RecordedGraphs

            return CudaGraphManager(name, [], GraphPool(RecordedGraphs()))
        role = GraphRole(name)
        decodes = role is GraphRole.DRAFT_DECODE
        support = self.draft_decode_support if decodes else self._prefill_support
        decision = resolve_mode(mode, support, role, uniform_token_counts)
        if decision.reason:
            logger.warning("%s graphs run as %s: %s", name, decision.mode.name, decision.reason)
        return CudaGraphManager.create(
            name,
            decision.mode,
            decision.uniform_token_counts,
            self._graphs.sizes,
            self.max_num_reqs,
            self.max_num_tokens,
            self._graphs.pool,
            self._graphs.progress,
            self._graphs.debug_compare_eager,
        )

    @property
    def draft_decode_support(self) -> AttentionCGSupport:
        """The least claim of the draft builders."""
        assert self._attention is not None
        return self._attention.support


class _NoAttention(AttentionMetadata):
    """Stands for a KV group without draft layers."""

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        raise AssertionError(f"layer {layer.layer_id} is no draft layer")


class _DraftAttention:
    """Builders and buffers of draft decodes: one token per request, rebuilt per decode step."""

    def __init__(
        self,
        cache: KVCache,
        builders: Sequence[AttentionBuilder | None],
        block_tables: Sequence[Tensor],
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._cache = cache
        self._builders = builders
        self._requests = block_tables
        self._max_model_len = max_model_len
        # Own buffers: the target's of this step may still be baked into a graph of another shape.
        self._block_tables = [
            torch.zeros((max_num_reqs, table.shape[1]), dtype=torch.int32, device=device)
            for table in block_tables
        ]
        self._slot_mappings = torch.zeros(
            (len(block_tables), max_num_tokens), dtype=torch.int64, device=device
        )

    @property
    def support(self) -> AttentionCGSupport:
        claims = [b.supports for b in self._builders if b is not None]
        return min(claims, default=AttentionCGSupport.ALWAYS)  # none: nothing to attend to

    def build(
        self,
        num_reqs: int,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        idx_mapping: Tensor,
        desc: BatchExecutionDescriptor | None,
        for_capture: bool,
        writes_kv: bool,
        query_lens: Sequence[int] | None,
    ) -> AttentionState:
        padded, num_tokens = seq_lens.shape[0], positions.shape[0]
        if for_capture:  # dummy rows belong to no request: they read the null block
            for table in self._block_tables:
                table.zero_()
        else:
            gather_block_tables(self._requests, idx_mapping, self._block_tables, num_reqs, padded)
        if writes_kv and not for_capture:
            sizes = [self._cache.block_size] * len(self._block_tables)
            compute_slot_mappings(
                self._block_tables,
                sizes,
                query_start_loc,
                positions,
                self._slot_mappings,
                num_reqs,
                num_reqs if query_lens is None else num_tokens,
                num_tokens,
            )
        else:
            self._slot_mappings.fill_(-1)
        starts = torch.arange(padded + 1, dtype=torch.int32).clamp(max=num_reqs)
        if query_lens is not None:
            starts[1:] = torch.tensor(query_lens).cumsum(0)
        bounds = torch.zeros(padded, dtype=torch.int32)
        bounds[:num_reqs] = self._max_model_len  # the host does not know how many were rejected
        metadata: list[AttentionMetadata] = []
        for group, builder in enumerate(self._builders):
            if builder is None:
                metadata.append(_NoAttention())
                continue
            common = CommonAttentionMetadata(
                num_reqs=padded,
                num_actual_tokens=num_tokens,
                max_query_len=1 if query_lens is None else max(query_lens),
                max_seq_len=self._max_model_len,
                query_start_loc=query_start_loc,
                query_start_loc_cpu=starts,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=bounds,
                block_table=self._block_tables[group],
                slot_mapping=self._slot_mappings[group],
            ).with_rows(padded, num_tokens)
            if for_capture:
                assert desc is not None
                metadata.append(builder.build_for_capture(common, desc))
            else:
                metadata.append(builder.build(common, desc))
        return self._cache.attention_state(metadata)
