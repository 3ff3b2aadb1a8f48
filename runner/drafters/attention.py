"""Builds the drafter's attention states: block tables, KV slots and metadata for each pass.

It has buffers of its own, because a graph of another shape may still read the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport, BatchExecutionDescriptor
from ...kernels.batch.gather_batch import compute_slot_mappings
from ...kernels.batch.padded_step import gather_padded_tables
from ...kernels.drafts.prepare_draft import map_draft_slots
from ..attention.base import (
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    AttentionState,
    CommonAttentionMetadata,
)
from ..batch.kv_cache import KVCache


class _NoAttention(AttentionMetadata):
    """Takes the place of metadata in a KV group without draft layers."""

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Tensor:
        raise AssertionError(f"layer {layer.layer_id} is not a draft layer")


class DraftAttention:
    """Builds attention states over the drafter's layers; builders and buffers are by KV group."""

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
        self._block_sizes = cache.block_sizes
        self._builders = builders
        self._requests = block_tables
        self._max_model_len = max_model_len
        self._block_tables = [
            torch.zeros((max_num_reqs, table.shape[1]), dtype=torch.int32, device=device)
            for table in block_tables
        ]
        self._slot_mappings = torch.zeros(
            (len(block_tables), max_num_tokens), dtype=torch.int64, device=device
        )

    @property
    def builds_on_device(self) -> bool:
        return all(builder.builds_on_device for builder in self._builders if builder is not None)

    @property
    def support(self) -> AttentionCGSupport:
        """Which batches all builders can run inside a graph."""
        claims = [b.supports for b in self._builders if b is not None]
        return min(claims, default=AttentionCGSupport.ALWAYS)  # no attention layers: no limit

    def build(
        self,
        num_reqs: int,
        query_start_loc: Tensor,  # [N* + 1] int32, min(i, N)
        seq_lens: Tensor,  # [N*] int32, padded 0
        positions: Tensor,  # [N*] int64, where KV is written; -1 = nowhere
        idx_mapping: Tensor,  # [N*] int32, padded -1
        desc: BatchExecutionDescriptor | None,
        writes_kv: bool = True,
    ) -> AttentionState:
        """The attention of a draft decode: one token for each of N = `num_reqs` requests.

        Without `writes_kv` no KV is written. Does not wait for the device.
        """
        rows = seq_lens.shape[0]
        self.gather_tables(num_reqs, rows, idx_mapping)
        if writes_kv:
            self._map_slots(seq_lens, positions)
        else:
            self._slot_mappings.fill_(-1)
        starts = torch.arange(rows + 1, dtype=torch.int32).clamp(max=num_reqs)
        return self._state(self._common(num_reqs, rows, 1, query_start_loc, starts, seq_lens), desc)

    def build_rows(
        self,
        query_lens: Sequence[int],  # [N], on the host
        query_start_loc: Tensor,  # [N + 1] int32, their running sums
        seq_lens: Tensor,  # [N] int32
        positions: Tensor,  # [M] int64, where each token's KV is written
        idx_mapping: Tensor,  # [N] int32, batch row -> slot
    ) -> AttentionState:
        """The attention of a pass over several tokens for each request; nothing is padded."""
        num_reqs, num_tokens = len(query_lens), positions.shape[0]
        self.gather_tables(num_reqs, num_reqs, idx_mapping)
        compute_slot_mappings(
            self._block_tables, self._block_sizes, query_start_loc, positions,
            self._slot_mappings, num_reqs, num_tokens, num_tokens,
        )  # fmt: skip
        starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(query_lens).cumsum(0)
        longest = max(query_lens)
        common = self._common(num_reqs, num_tokens, longest, query_start_loc, starts, seq_lens)
        return self._state(common, None)

    def build_for_capture(
        self, query_start_loc: Tensor, seq_lens: Tensor, desc: BatchExecutionDescriptor
    ) -> AttentionState:
        """As `build`, for rows that belong to no request: they read the null block and write no
        KV."""
        for table in self._block_tables:
            table.zero_()
        self._slot_mappings.fill_(-1)
        rows = seq_lens.shape[0]
        starts = torch.arange(rows + 1, dtype=torch.int32)
        common = self._common(rows, rows, 1, query_start_loc, starts, seq_lens)
        return self._state(common, desc, for_capture=True)

    def gather_tables(self, num_reqs: int, rows: int, idx_mapping: Tensor) -> None:
        """Copy the requests' block tables to batch rows; padded rows get the null block."""
        assert num_reqs <= rows
        gather_padded_tables(self._requests, idx_mapping, self._block_tables, rows)

    def on_device(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        desc: BatchExecutionDescriptor,
        writes_kv: bool,
    ) -> Callable[[], AttentionState]:
        """For the capture of several decodes in one graph: each call of the result builds the
        attention of one more decode, by operations of the device alone, from the values that the
        buffers hold then. Shapes as in `build`; block tables as `gather_tables` left them.
        """
        rows = seq_lens.shape[0]
        for table in self._block_tables:  # the warm-up must not touch a request's KV
            table.zero_()
        starts = torch.arange(rows + 1, dtype=torch.int32)
        common = self._common(rows, rows, 1, query_start_loc, starts, seq_lens)

        def build() -> AttentionState:
            if writes_kv:
                self._map_slots(seq_lens, positions)
            else:
                self._slot_mappings[:, :rows].fill_(-1)
            return self._state(common, desc, for_capture=True)

        return build

    def _map_slots(self, seq_lens: Tensor, positions: Tensor) -> None:
        map_draft_slots(
            self._block_tables, self._block_sizes, seq_lens, positions, self._slot_mappings
        )

    def _common(
        self,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        query_start_loc: Tensor,
        query_start_loc_cpu: Tensor,
        seq_lens: Tensor,
    ) -> list[CommonAttentionMetadata]:
        """The common metadata by KV group. Of the rows of `seq_lens`, `num_reqs` are real."""
        padded = seq_lens.shape[0]
        bounds = torch.zeros(padded, dtype=torch.int32)
        bounds[:num_reqs] = self._max_model_len  # how many drafts were rejected is not known here
        return [
            CommonAttentionMetadata(
                num_reqs=padded,
                num_actual_tokens=num_tokens,
                max_query_len=max_query_len,
                max_seq_len=self._max_model_len,
                query_start_loc=query_start_loc,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=bounds,
                block_table=table,
                slot_mapping=slots,
            ).with_rows(padded, num_tokens)
            for table, slots in zip(self._block_tables, self._slot_mappings, strict=True)
        ]

    def _state(
        self,
        common: Sequence[CommonAttentionMetadata],
        desc: BatchExecutionDescriptor | None,
        for_capture: bool = False,
    ) -> AttentionState:
        metadata: list[AttentionMetadata] = []
        for builder, group in zip(self._builders, common, strict=True):
            if builder is None:
                metadata.append(_NoAttention())
            elif for_capture:
                assert desc is not None
                metadata.append(builder.build_for_capture(group, desc))
            else:
                metadata.append(builder.build(group, desc))
        return self._cache.attention_state(metadata)
