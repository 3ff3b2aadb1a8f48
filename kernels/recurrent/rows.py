"""The tensors of gated delta layers: constants, weights, states per request, and a step's rows.

A request keeps one recurrent state per layer and a *log*: the layer's inputs of its newest tokens,
which a verification may still reject. `length` counts the tokens that the state has absorbed. A
step first absorbs the logged tokens before its own first position, which are exactly the accepted
ones, and then processes its own tokens on a copy of the state and logs them. Rejected tokens
therefore never reach the state, whatever was accepted and whether or not the last step drafted.

A row of more tokens than the log holds is part of a prompt, of which nothing can be rejected: the
state absorbs it at once. With a log of 0 tokens (no drafts) this is every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

CHUNK = 64  # tokens

# Rows of `StateTable.values` and of `DeltaRows.values`.
LENGTH, BORDER, BLOCK = 0, 1, 2
SLOT, START, LAG, COUNT = 3, 4, 5, 6
NUM_ROW_VALUES = 7


@dataclass(frozen=True)
class DeltaShape:
    """The constants of a gated delta layer.

    A token's input is one row of `channels` values: queries, keys, values (which the convolution
    mixes), then b and a for each value head.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # per head, of queries too
    value_dim: int  # per head
    conv_width: int  # taps of the causal convolution

    @property
    def key_size(self) -> int:
        """Channels of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution mixes."""
        return 2 * self.key_size + self.value_size

    @property
    def channels(self) -> int:
        """Values of a token's input."""
        return self.conv_channels + 2 * self.num_value_heads


@dataclass(frozen=True)
class DeltaWeights:
    """The weights of a layer that belong to the recurrence."""

    conv: Tensor  # [conv_channels, conv_width] float32, the newest token's tap last
    decay_rate: Tensor  # [value heads] float32, exp(A_log)
    dt_bias: Tensor  # [value heads] float32


@dataclass(frozen=True)
class OutputGate:
    """What is done with each head's outputs: RMSNorm, times silu of a gate."""

    values: Tensor  # [M*, value heads * value_dim], contiguous in each row
    weight: Tensor  # [value_dim]
    eps: float


@dataclass(frozen=True)
class DeltaState:
    """One layer's states. Slot R and block 0 belong to no request: padded rows write there."""

    state: Tensor  # [R + 1, value heads, key_dim, value_dim] float32
    history: Tensor  # [R + 1, conv_width - 1 + log, channels], inputs from length - 3 on
    snapshots: Tensor  # [B, value heads, key_dim, value_dim] float32
    snapshot_tails: Tensor  # [B, conv_width - 1, channels]


@dataclass(frozen=True)
class StateTable:
    """How many tokens each slot's states have absorbed, the same for all layers.

    `values` [3, R + 1] int32 has the rows LENGTH (tokens that the state has absorbed), BORDER (the
    length at which a snapshot is taken) and BLOCK (where it is written; 0 = nowhere).
    """

    values: Tensor


@dataclass(frozen=True)
class BulkRows:
    """The batch rows of a step whose tokens the states absorb at once, instead of logging them."""

    rows: list[list[int]]  # batch row, first token row, tokens
    row_table: Tensor | None = None  # [B, 3] int32, the same
    # [C, 4] int32, their chunks: batch row, the row's first token row, tokens of the row before the
    # chunk, tokens
    chunk_table: Tensor | None = None

    @classmethod
    def find(
        cls, starts: list[int], limit: int, upload: Callable[[np.ndarray], Tensor]
    ) -> BulkRows:
        """Find the batch rows that have more than `limit` tokens, and cut them into chunks.

        `starts` [N + 1] are the batch rows' first token rows. `upload` copies an array to the
        device.
        """
        pairs = enumerate(zip(starts, starts[1:], strict=False))
        rows = [[row, start, end - start] for row, (start, end) in pairs if end - start > limit]
        if not rows:
            return cls([])
        chunks = [
            [row, first, before, min(CHUNK, count - before)]
            for row, first, count in rows
            for before in range(0, count, CHUNK)
        ]
        tables = (upload(np.array(table, dtype=np.int32)) for table in (rows, chunks))
        return cls(rows, *tables)


@dataclass(frozen=True)
class DeltaRows:
    """A step's rows, the same for every layer.

    `values` [7, N*] int32 is indexed by LENGTH, BORDER, BLOCK, SLOT, START (position of the first
    token), LAG (logged tokens to absorb first) and COUNT (tokens).
    """

    values: Tensor
    query_start_loc: Tensor  # [N* + 1] int32
    log: int  # tokens that a history can hold besides the convolution's
    max_count: int  # of rows that are not bulk
    max_lag: int
    bulk: BulkRows
    on_host: bool  # values may be read on the host, so that empty work is skipped
