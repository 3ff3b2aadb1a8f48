"""The reference attention back end in plain torch: the tests' oracle, and the CPU's default."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import replace

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
    BuilderSizes,
    CommonAttentionMetadata,
)
from .compressed import CompressedBuilder


class ReferenceMetadata(AttentionMetadata):
    """One step's page lists, masks and write slots, shared by all layers.

    They are computed when the first layer attends. Native layers do not need them: these read
    `common` and `block_size`.
    """

    def __init__(
        self,
        common: CommonAttentionMetadata,
        block_size: int,
        sliding_window: int | None,
        dtype: torch.dtype,
        is_one_row: bool = False,
    ) -> None:
        """`is_one_row`: see `rows`."""
        self._is_one_row = is_one_row
        # copies, because later steps overwrite the buffers
        self.common = replace(
            common,
            query_start_loc=common.query_start_loc.clone(),
            seq_lens=common.seq_lens.clone(),
            block_table=common.block_table.clone(),
            slot_mapping=common.slot_mapping.clone(),
        )
        self.block_size = block_size
        self._sliding_window, self._dtype = sliding_window, dtype

    @functools.cached_property
    def _plan(self) -> AttentionPlan:
        return plan_attention(
            self.common.block_table,
            self.common.query_start_loc.tolist(),
            self.common.seq_lens.tolist(),
            self.block_size,
            self._sliding_window,
            self._dtype,
            self._is_one_row,
        )

    def rows(self) -> list[ReferenceMetadata]:
        """The metadata of each token row alone, as of a decode whose bits depend on no other row.

        The rows must run in this order, since later ones read what earlier ones write.
        """
        common, alone = self.common, []
        starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
        start_loc = torch.tensor([0, 1], dtype=torch.int32)
        for token in range(common.num_actual_tokens):
            # rows after the last request attend to nothing
            request = min(bisect.bisect_right(starts, token), len(lengths)) - 1
            length = max(0, lengths[request] - (starts[request + 1] - 1 - token))
            length = length if token < starts[-1] else 0
            seq_lens = torch.tensor([length], dtype=torch.int32)
            row = replace(
                common,
                num_reqs=1,
                num_actual_tokens=1,
                max_query_len=1,
                query_start_loc=start_loc,
                query_start_loc_cpu=start_loc,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens,
                block_table=common.block_table[request : request + 1],
                slot_mapping=common.slot_mapping[token : token + 1],
            )
            settings = (self.block_size, self._sliding_window, self._dtype, True)
            alone.append(ReferenceMetadata(row, *settings))
        return alone

    @functools.cached_property
    def _written(self) -> tuple[Tensor | None, Tensor]:
        """(token rows that have a slot, None = all; their slots), each [written] int64."""
        slots = self.common.slot_mapping
        written = slots >= 0
        if bool(written.all()):
            return None, slots
        rows = written.nonzero().squeeze(1)
        return rows, slots[rows]

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        if key is not None:
            rows, slots = self._written
            if rows is not None:
                key = key.index_select(0, rows)
                value = None if value is None else value.index_select(0, rows)
            store_kv_reference(key, value, kv_cache, slots, all_valid=True, fp8=layer.fp8)
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
        return ReferenceMetadata(common, self._block_size, self._sliding_window, self._dtype)


class ReferenceBackend(AttentionBackend):
    """Runs any layer anywhere."""

    name = "reference"

    @classmethod
    def check(cls, layers: Sequence[AttentionLayer], device: torch.device) -> str | None:
        return None

    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> AttentionBuilder:
        if layers[0].is_compressed:
            return CompressedBuilder(sizes.block_size, in_graphs=False)
        return ReferenceBuilder(sizes.block_size, layers[0].sliding_window, sizes.dtype)
