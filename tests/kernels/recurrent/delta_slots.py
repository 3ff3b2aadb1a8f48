"""The states of some slots in one gated delta layer, for tests of its kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.recurrent.gated_delta import gated_delta_reference
from slipstream.kernels.recurrent.prepare_rows import prepare_rows_reference
from slipstream.kernels.recurrent.rows import (
    LAG,
    NUM_ROW_VALUES,
    BulkRows,
    DeltaRows,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    StateTable,
)

SHAPE = DeltaShape(2, 4, 8, 16, 4)


@dataclass
class Slots:
    """R slots with states of nobody, blocks for saved states, and the weights of one layer."""

    weights: DeltaWeights
    state: DeltaState
    table: StateTable
    log: int
    shape: DeltaShape
    prepare: Callable[..., None] = prepare_rows_reference
    kernel: Callable[..., Tensor] = gated_delta_reference
    device: torch.device = torch.device("cpu")

    @classmethod
    def make(
        cls,
        num_slots: int,
        log: int,
        shape: DeltaShape = SHAPE,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 4,
        **kernels: Callable[..., object],
    ) -> Slots:
        generator = torch.Generator().manual_seed(7)
        heads, size = shape.num_value_heads, (shape.key_dim, shape.value_dim)
        weights = DeltaWeights(
            torch.randn(shape.conv_channels, shape.conv_width, generator=generator) * 0.5,
            torch.rand(heads, generator=generator),
            torch.randn(heads, generator=generator),
        )
        tail = shape.conv_width - 1
        state = DeltaState(
            torch.full((num_slots + 1, heads, *size), 9.0),
            torch.full((num_slots + 1, tail + log, shape.channels), 9.0, dtype=dtype),
            torch.zeros(num_blocks, heads, *size),
            torch.zeros(num_blocks, tail, shape.channels, dtype=dtype),
        )
        table = StateTable(torch.zeros(3, num_slots + 1).int())
        return cls(weights, state, table, log, shape, **kernels)  # type: ignore[arg-type]

    def rows(self, rows: list[tuple[int, int, int]], padding: int = 0) -> DeltaRows:
        """The rows (slot, position, tokens) of a step, and padded ones."""
        counts = [count for _, _, count in rows]
        starts = torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int()
        positions = torch.cat([torch.arange(at, at + count) for _, at, count in rows])
        values = torch.full((NUM_ROW_VALUES, len(rows) + padding), 77, dtype=torch.int32)
        slots = torch.tensor([slot for slot, _, _ in rows] + [-1] * padding, dtype=torch.int32)
        firsts = starts[: len(rows) + 1].tolist()
        slots, starts, positions, values = (
            tensor.to(self.device) for tensor in (slots, starts, positions, values)
        )
        self.prepare(self.table, slots, starts, positions, self.log, values)
        limit = max(self.log, 1)
        return DeltaRows(
            values,
            starts,
            self.log,
            max([count for count in counts if count <= limit], default=0),
            int(values[LAG].max()),
            BulkRows.find(firsts, limit, lambda array: torch.from_numpy(array).to(self.device)),
            True,
        )

    def run(self, x: Tensor, rows: list[tuple[int, int, int]], padding: int = 0) -> Tensor:
        """Process a step's tokens x [M, channels]."""
        return self.kernel(x, self.weights, self.shape, self.state, self.rows(rows, padding))


Step = tuple[Tensor, list[tuple[int, int, int]], int]  # the arguments of `Slots.run`


def random_steps(
    text: Tensor, where: list[int], log: int, rng: random.Random, counts: list[int]
) -> list[tuple[Step, list[tuple[int, int, int]]]]:
    """Steps that process text [requests, T, channels] in the slots `where`, in rows of random
    lengths, with wrong tokens behind them as far as the log allows.

    With each step come its (request, position, right tokens).
    """
    done, steps = [0] * len(text), []
    while min(done) < text.shape[1]:
        rows, right, inputs = [], [], []
        for request in rng.sample(range(len(text)), rng.randint(1, len(text))):
            at = done[request]
            count = min(text.shape[1] - at, rng.choice(counts))
            if count:
                wrong = rng.randint(0, max(0, log - count))
                inputs += [text[request, at : at + count], torch.randn(wrong, text.shape[2])]
                rows.append((where[request], at, count + wrong))
                right.append((request, at, count))
                done[request] += count
        if rows:
            step = torch.cat(inputs).to(text.dtype), rows, rng.randint(0, 2)
            steps.append((step, right))
    return steps
