"""Recurrent layers in a forward pass: the step's rows, and the states that the layers update.

A model calls `AttentionState.recur` for each of its gated delta layers. The builder owns buffers at
fixed addresses, because graphs bake them; `batch.recurrent_states` owns the states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...configs.graphs import AttentionCGSupport
from ...kernels.recurrent.gated_delta import gated_delta
from ...kernels.recurrent.prepare_rows import prepare_rows
from ...kernels.recurrent.rows import (
    LAG,
    NUM_ROW_VALUES,
    BulkRows,
    DeltaRows,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
    StateTable,
)


@dataclass(frozen=True)
class RecurrentLayer:
    """The constants of a gated delta layer; `layer_id` counts the recurrent layers of a model."""

    layer_id: int
    shape: DeltaShape


@dataclass(frozen=True)
class RecurrentMetadata:
    """The recurrent layers of one forward pass."""

    rows: DeltaRows
    states: Mapping[int, DeltaState]  # by layer_id
    shapes: Mapping[int, DeltaShape]

    def recur(self, layer_id: int, x: Tensor, weights: DeltaWeights, gate: OutputGate) -> Tensor:
        """x: [M*, channels] -> [M*, value size], normed and gated; updates the layer's states."""
        shape, state = self.shapes[layer_id], self.states[layer_id]
        return gated_delta(x, weights, shape, state, self.rows, gate)


class StepBuffers(Protocol):
    """The part of `InputBuffers` that says which rows a step has."""

    idx_mapping: Tensor  # [max N*] int32
    query_start_loc: Tensor  # [max N* + 1] int32
    positions: Tensor  # [max M*] int64
    max_num_reqs: int


class RecurrentBuilder:
    """Builds the metadata of each step."""

    # A graph's rows must not exceed the log, as those of a verification never do.
    supports = AttentionCGSupport.UNIFORM_BATCH
    builds_on_device = True

    def __init__(
        self,
        table: StateTable,
        states: Mapping[int, DeltaState],
        shapes: Mapping[int, DeltaShape],
        log: int,
        max_num_reqs: int,
        upload: Callable[[np.ndarray], Tensor],  # copies an array to the device without waiting
    ) -> None:
        self._upload = upload
        self._table, self._states, self._shapes, self._log = table, states, shapes, log
        device = table.values.device
        self._values = torch.zeros(NUM_ROW_VALUES, max_num_reqs, dtype=torch.int32, device=device)

    def repeats(self, max_query_len: int) -> bool:
        """Whether a step of such rows can be run twice: only if states absorb none at once."""
        return max_query_len <= self._log

    def build(
        self,
        buffers: StepBuffers,
        num_reqs: int,
        num_tokens: int,
        query_start_loc_cpu: Tensor,  # [N* + 1]
        for_graph: bool,
    ) -> RecurrentMetadata:
        """Prepare the rows of a step in the buffers, of N* = `num_reqs` requests.

        For a graph, nothing depends on the step but its number of rows and their length.
        """
        values = self._values[:, :num_reqs]
        starts = buffers.query_start_loc[: num_reqs + 1]
        prepare_rows(
            self._table, buffers.idx_mapping[:num_reqs], starts,
            buffers.positions[: max(1, num_tokens)], self._log, values,
        )  # fmt: skip
        first = query_start_loc_cpu[: num_reqs + 1].tolist()
        counts = [end - start for start, end in zip(first, first[1:], strict=False)]
        limit = max(self._log, 1)
        assert not for_graph or max(counts, default=0) <= limit, "a graph's rows exceed the log"
        on_host = values.is_cpu and not for_graph
        rows = DeltaRows(
            values,
            starts,
            self._log,
            max((count for count in counts if count <= limit), default=0),
            int(values[LAG].max()) if on_host and num_reqs else self._log,
            BulkRows.find(first, limit, self._upload),
            on_host,
        )
        return RecurrentMetadata(rows, self._states, self._shapes)
