"""The buffers of a step, at fixed addresses with one row per request or token, and their filling.

They are gathered from the request table through `idx_mapping`. This file knows neither models nor
samplers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...configs.graphs import BatchExecutionDescriptor, StepMode
from ...kernels.batch.gather_batch import compute_slot_mappings, gather_block_tables, prepare_inputs
from ...kernels.batch.padded_step import (
    gather_padded_tables,
    map_padded_slots,
    prepare_padded_inputs,
)
from ...kernels.batch.step_sizes import StepSizes
from ..attention.base import CommonAttentionMetadata
from ..scheduling.plan import ScheduledRow
from .host_copy import StagingPool
from .request_table import RequestTable


@dataclass(frozen=True)
class InputBatch:
    """One step's batch: N requests padded to N*, M tokens padded to M*, and L logits rows.

    Its tensors are views of the step buffers.
    """

    num_reqs: int  # N
    num_tokens: int  # M
    num_logits: int  # L
    # the query length of all requests if equal and none is in prefill
    uniform_token_count: int | None
    descriptor: BatchExecutionDescriptor
    mode: StepMode
    slots: list[int]  # [N] batch row -> slot
    idx_mapping: Tensor  # [N*] int32, batch row -> slot, -1 for padded rows
    query_start_loc: Tensor  # [N* + 1] int32, padded entries repeat M
    query_start_loc_cpu: Tensor  # [N* + 1]
    seq_lens: Tensor  # [N*] int32, padded 0
    input_ids: Tensor  # [M*] int32
    positions: Tensor  # [M*] int64
    logits_indices: Tensor  # [L] int64, logits row -> token row
    cu_num_logits: Tensor  # [N + 1] int32
    cu_num_logits_cpu: list[int]  # [N + 1]
    expanded_idx_mapping: Tensor  # [L] int32, logits row -> slot
    expanded_local_pos: Tensor  # [L] int32, 0 .. n_draft
    draft_ids: Tensor  # [L] int64, the draft that the row judges, -1 = none
    logits_positions: Tensor  # [L] int64, sequence position of the row
    num_draft_tokens: Tensor  # [N] int32, drafts that are not -1
    num_draft_tokens_cpu: list[int]  # [N] drafts in the layout, including -1
    common: list[CommonAttentionMetadata]  # per group


class InputBuffers:
    """The step buffers. Kernels fill them; graphs bake their addresses.

    Sized for the largest step.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        num_speculative_tokens: int,
        block_sizes: Sequence[int],  # per group
        max_blocks: Sequence[int],  # per group
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        reqs, tokens = max_num_reqs, max_num_tokens
        logits = reqs * (num_speculative_tokens + 1)
        self.max_num_reqs = reqs
        self.max_num_tokens = tokens
        self.max_model_len = max_model_len
        self.max_decode_len = num_speculative_tokens + 1
        self.block_sizes = list(block_sizes)
        # [3, max N* + 1] the next three arrays, padded, which one upload fills
        self._series = zeros(3, reqs + 1)
        self.idx_mapping = self._series[0, :reqs]
        self.query_start_loc = self._series[1]
        self.cu_num_logits = self._series[2]
        self.seq_lens = zeros(reqs)
        self.num_draft_tokens = zeros(reqs)
        self.input_ids = zeros(tokens)
        self.positions = zeros(tokens, dtype=torch.int64)
        self.logits_indices = zeros(logits, dtype=torch.int64)
        self.expanded_idx_mapping = zeros(logits)
        self.expanded_local_pos = zeros(logits)
        self.draft_ids = zeros(logits, dtype=torch.int64)
        self.logits_positions = zeros(logits, dtype=torch.int64)
        self.block_tables = [zeros(reqs, blocks) for blocks in max_blocks]
        self.slot_mappings = zeros(len(block_sizes), tokens, dtype=torch.int64)
        self._pool = StagingPool(device)
        # The contents of `_series` if a WHOLE step filled it, and that step's batch.
        self._placed: tuple[BatchExecutionDescriptor, list[int], list[int]] | None = None
        self._placed_batch: InputBatch | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer by name; a test fills them with poison before a step."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and not name.startswith("_")
        } | {f"block_tables[{g}]": table for g, table in enumerate(self.block_tables)}

    def gather(
        self,
        rows: Sequence[ScheduledRow],
        # [N] tokens of each row; fewer than scheduled if drafts are trimmed
        query_lens: Sequence[int],
        num_drafts: Sequence[int],  # [N] drafts in the layout
        table: RequestTable,
        descriptor: BatchExecutionDescriptor,
        uniform_token_count: int | None,
        mode: StepMode = StepMode.EAGER,
    ) -> InputBatch:
        """Fill the buffers for these rows, padded to `descriptor`, without waiting for the
        device."""
        self._placed = None
        slots = [row.slot for row in rows]
        reqs_padded, tokens_padded = descriptor.num_reqs or len(rows), descriptor.num_tokens
        series = self._upload_series(slots, query_lens, num_drafts, descriptor)
        num_reqs = len(rows)
        num_tokens, num_logits = int(series[1, num_reqs]), int(series[2, num_reqs])
        bounds = np.zeros(self.max_num_reqs, dtype=np.int32)
        bounds[:num_reqs] = [row.num_computed_tokens for row in rows]
        bounds[:num_reqs] += np.asarray(query_lens, dtype=np.int32)
        sizes = StepSizes(num_reqs, num_tokens, num_logits, reqs_padded, tokens_padded)
        prepare_inputs(table, self, sizes)
        self._gather_blocks(table, num_reqs, num_tokens, reqs_padded, tokens_padded)
        host_series, host_bounds = torch.from_numpy(series), torch.from_numpy(bounds)
        common = self.common(
            reqs_padded, tokens_padded, host_series[1], host_bounds, max(query_lens)
        )
        return self._views(
            slots, num_drafts, host_series, descriptor, mode, uniform_token_count, common
        )

    def place(
        self,
        slots: list[int],  # [N]
        num_drafts: list[int],  # [N] drafts in the layout
        descriptor: BatchExecutionDescriptor,
        uniform_token_count: int,
    ) -> InputBatch:
        """Like `gather` for a WHOLE step: upload the batch's slots and layout if they changed.

        Its graph fills the other buffers (`gather_placed`). Bounds are the largest, as in a
        capture.
        """
        key = (descriptor, slots, num_drafts)
        if key == self._placed and self._placed_batch is not None:
            return self._placed_batch
        num_reqs = len(slots)
        query_lens = [uniform_token_count] * num_reqs
        series = self._upload_series(slots, query_lens, num_drafts, descriptor)
        host_series = torch.from_numpy(series)
        bounds = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        bounds[:num_reqs] = self.max_model_len
        common = self.common(
            descriptor.num_reqs or num_reqs,
            descriptor.num_tokens,
            host_series[1],
            bounds,
            uniform_token_count,
            capture=True,
        )
        self._placed = key
        self._placed_batch = self._views(
            slots, num_drafts, host_series, descriptor, StepMode.WHOLE, uniform_token_count, common
        )
        return self._placed_batch

    def gather_placed(self, table: RequestTable, descriptor: BatchExecutionDescriptor) -> None:
        """Fill the buffers that `place` leaves out. The graph of the descriptor contains this."""
        num_reqs, num_tokens = descriptor.num_reqs, descriptor.num_tokens
        assert num_reqs is not None
        prepare_padded_inputs(table, self, num_reqs, num_tokens, num_tokens)
        gather_padded_tables(table.block_tables, self.idx_mapping, self.block_tables, num_reqs)
        map_padded_slots(
            self.block_tables,
            self.block_sizes,
            self.query_start_loc,
            self.positions,
            self.slot_mappings,
            num_reqs,
            num_tokens,
        )

    def _upload_series(
        self,
        slots: Sequence[int],
        query_lens: Sequence[int],
        num_drafts: Sequence[int],
        descriptor: BatchExecutionDescriptor,
    ) -> np.ndarray:
        """Compute the padded series, [3, max N* + 1], upload it and return the host's copy."""
        num_reqs = len(slots)
        assert num_reqs <= (descriptor.num_reqs or num_reqs) <= self.max_num_reqs
        assert sum(query_lens) <= descriptor.num_tokens <= self.max_num_tokens
        series = np.empty((3, self.max_num_reqs + 1), dtype=np.int32)
        series[0, :num_reqs] = slots
        series[0, num_reqs:] = -1
        series[1:, 0] = 0
        np.cumsum(query_lens, out=series[1, 1 : num_reqs + 1])
        np.cumsum(np.asarray(num_drafts) + 1, out=series[2, 1 : num_reqs + 1])
        series[1:, num_reqs + 1 :] = series[1:, num_reqs, None]
        self._pool.upload(series, out=self._series)
        return series

    def _views(
        self,
        slots: list[int],
        num_drafts: Sequence[int],
        series: Tensor,  # [3, max N* + 1] int32, on the host
        descriptor: BatchExecutionDescriptor,
        mode: StepMode,
        uniform_token_count: int | None,
        common: list[CommonAttentionMetadata],
    ) -> InputBatch:
        num_reqs = len(slots)
        num_tokens, num_logits = int(series[1, num_reqs]), int(series[2, num_reqs])
        reqs_padded, tokens_padded = descriptor.num_reqs or num_reqs, descriptor.num_tokens
        return InputBatch(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_logits=num_logits,
            uniform_token_count=uniform_token_count,
            descriptor=descriptor,
            mode=mode,
            slots=slots,
            idx_mapping=self.idx_mapping[:reqs_padded],
            query_start_loc=self.query_start_loc[: reqs_padded + 1],
            query_start_loc_cpu=series[1, : reqs_padded + 1],
            seq_lens=self.seq_lens[:reqs_padded],
            input_ids=self.input_ids[:tokens_padded],
            positions=self.positions[:tokens_padded],
            logits_indices=self.logits_indices[:num_logits],
            cu_num_logits=self.cu_num_logits[: num_reqs + 1],
            cu_num_logits_cpu=series[2, : num_reqs + 1].tolist(),
            expanded_idx_mapping=self.expanded_idx_mapping[:num_logits],
            expanded_local_pos=self.expanded_local_pos[:num_logits],
            draft_ids=self.draft_ids[:num_logits],
            logits_positions=self.logits_positions[:num_logits],
            num_draft_tokens=self.num_draft_tokens[:num_reqs],
            num_draft_tokens_cpu=list(num_drafts),
            common=common,
        )

    def fill_dummy(self, descriptor: BatchExecutionDescriptor) -> list[CommonAttentionMetadata]:
        """Fill the buffers with a batch for warm-up and capture, which writes no KV.

        No request row is padding: each has the uniform length or an even share of the tokens, and
        attends to as many positions of the null block as it has tokens.
        """
        self._placed = None
        num_tokens = descriptor.num_tokens
        num_reqs = descriptor.num_reqs or min(num_tokens, self.max_num_reqs)
        each = descriptor.uniform_token_count or -(-num_tokens // num_reqs)
        series = np.zeros((3, self.max_num_reqs + 1), dtype=np.int32)
        series[0] = -1
        series[1:] = np.minimum(np.arange(self.max_num_reqs + 1) * each, num_tokens)
        self._pool.upload(series, out=self._series)
        lens = np.zeros(self.max_num_reqs, dtype=np.int32)
        lens[:num_reqs] = np.minimum(np.diff(series[1])[:num_reqs], self.max_model_len)
        self._pool.upload(lens, out=self.seq_lens)
        self.input_ids.zero_()
        self.positions.zero_()
        self.slot_mappings.fill_(-1)
        for blocks in self.block_tables:
            blocks.zero_()
        host = torch.from_numpy(series)[1]
        return self.common(num_reqs, num_tokens, host, torch.from_numpy(lens), each, capture=True)

    def common(
        self,
        num_reqs: int,
        num_tokens: int,
        query_start_loc_cpu: Tensor,  # [max N* + 1] int32
        bounds: Tensor,  # [max N*] int32, upper bounds of seq_lens
        max_query_len: int,
        capture: bool = False,
    ) -> list[CommonAttentionMetadata]:
        """The metadata of each group, cut to these padded rows.

        With `capture`, bounds are maximal.
        """
        max_seq_len = self.max_model_len if capture else max(int(bounds.max()), 1)
        return [
            CommonAttentionMetadata(
                num_reqs=self.max_num_reqs,
                num_actual_tokens=self.max_num_tokens,
                max_query_len=max_query_len,
                max_seq_len=min(max_seq_len, self.max_model_len),
                query_start_loc=self.query_start_loc,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=self.seq_lens,
                seq_lens_cpu_upper_bound=bounds,
                block_table=block_table,
                slot_mapping=slot_mapping,
                max_decode_len=self.max_decode_len,
            ).with_rows(num_reqs, num_tokens)
            for block_table, slot_mapping in zip(self.block_tables, self.slot_mappings, strict=True)
        ]

    def _gather_blocks(
        self, table: RequestTable, num_reqs: int, num_tokens: int, reqs_padded: int, padded: int
    ) -> None:
        gather_block_tables(
            table.block_tables, self.idx_mapping, self.block_tables, num_reqs, reqs_padded
        )
        compute_slot_mappings(
            self.block_tables,
            self.block_sizes,
            self.query_start_loc,
            self.positions,
            self.slot_mappings,
            num_reqs,
            num_tokens,
            padded,
        )
