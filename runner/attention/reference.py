"""The reference attention back end in plain torch: the tests' oracle, and the CPU's default."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor
from ...kernels.attention.paged_attention import AttentionPlan, plan_attention, planned_attention
from ...kernels.attention.store_kv import store_kv_reference
from .base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    CommonAttentionMetadata,
)


class ReferenceMetadata(AttentionMetadata):
    """One step's page lists, masks and write slots, computed once for all layers."""

    def __init__(self, plan: AttentionPlan, rows: Tensor | None, slots: Tensor) -> None:
        self._plan = plan
        self._rows = rows  # [written] token rows that have a slot; None = all
        self._slots = slots  # [written] int64

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        if key is not None:
            if self._rows is not None:
                key = key.index_select(0, self._rows)
                value = None if value is None else value.index_select(0, self._rows)
            store_kv_reference(key, value, kv_cache, self._slots, all_valid=True)
        return planned_attention(query, kv_cache, self._plan, layer)


class ReferenceBuilder(AttentionBuilder):
    """Plans on the host. On a GPU it waits for the device, so no graph can contain it."""

    supports = AttentionCGSupport.NEVER

    def __init__(self, block_size: int, sliding_window: int | None, dtype: torch.dtype) -> None:
        self._block_size = block_size
        self._sliding_window = sliding_window
        self._dtype = dtype

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> ReferenceMetadata:
        plan = plan_attention(
            common.block_table,
            common.query_start_loc.tolist(),
            common.seq_lens.tolist(),
            self._block_size,
            self._sliding_window,
            self._dtype,
        )
        slots = common.slot_mapping
        written = slots >= 0
        if bool(written.all()):
            return ReferenceMetadata(plan, None, slots.clone())
        rows = written.nonzero().squeeze(1)
        return ReferenceMetadata(plan, rows, slots[rows])


class ReferenceBackend(AttentionBackend):
    """Runs any layer anywhere."""

    name = "reference"

    @classmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        return None

    def create_builder(
        self,
        layers: Sequence[AttentionLayer],
        block_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ReferenceBuilder:
        return ReferenceBuilder(block_size, layers[0].sliding_window, dtype)
