"""Lets a drafter with KV of its own skip steps: it keeps their inputs and processes them later.

While nothing is drafted, a step only copies its hidden states to a ring buffer for each request.
Before the next draft, or when the ring is full, one pass over the missed tokens writes their KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .base import DraftHost, DraftInputs
from .draft_head import DraftModel

_RING_BYTES = 1 << 27
_MOST_TOKENS, _FEWEST_TOKENS = 64, 8


class BuildAttention(Protocol):
    """Builds the drafter's attention over rows of several tokens (`DraftAttention.build_rows`)."""

    def __call__(
        self,
        query_lens: Sequence[int],  # [N], on the host
        query_start_loc: Tensor,  # [N + 1] int32
        seq_lens: Tensor,  # [N] int32
        positions: Tensor,  # [M] int64
        idx_mapping: Tensor,  # [N] int32, batch row -> slot
    ) -> Any: ...


class DeferredTokens:
    """Keeps the hidden states of tokens that a drafter has not processed yet, by slot.

    Position p of a request is in column p mod `capacity` of its slot's ring. Token ids are not
    kept, as the request table has them. The runner counts the tokens (`DraftInputs.num_deferred`)
    and must not let a request have more than `capacity`.
    """

    def __init__(self, host: DraftHost, width: int, keeps_hidden: bool, shift: int) -> None:
        """`width`: of the hidden states. Without `keeps_hidden` the drafter reads none: no ring.

        `shift`: the model reads the token id of position p + shift together with position p.
        """
        row_bytes = host.max_num_reqs * width * host.dtype.itemsize
        wanted = _RING_BYTES // row_bytes if keeps_hidden else _MOST_TOKENS
        # One pass must hold all tokens of a request, and its buffers hold one step.
        self.capacity = min(max(_FEWEST_TOKENS, min(_MOST_TOKENS, wanted)), host.max_num_tokens)
        self._host, self._shift = host, shift
        self._ring: Tensor | None = None  # [R, capacity, width]
        if keeps_hidden:
            self._ring = torch.zeros(
                (host.max_num_reqs, self.capacity, width), dtype=host.dtype, device=host.device
            )

    def keep(self, inputs: DraftInputs, hidden: Tensor) -> None:
        """Keep the hidden states [>= N, width] of a deferred step, which has one token per row."""
        if self._ring is None:
            return
        rows = inputs.num_reqs
        slots = inputs.idx_mapping[:rows].long()  # [N] batch row -> slot
        self._ring[slots, inputs.positions[:rows] % self.capacity] = hidden[:rows]

    def catch_up(
        self, inputs: DraftInputs, model: DraftModel, max_position: int, build: BuildAttention
    ) -> None:
        """Write the KV of all tokens that the requests of this step have missed.

        `inputs` are those of the present step, which is processed afterwards. Positions are limited
        to `max_position` - 1.
        """
        counts = np.asarray(inputs.num_deferred, dtype=np.int32)
        for rows in _groups(counts, self._host.max_num_tokens):
            self._catch_up_rows(inputs, rows, counts[rows], model, max_position, build)

    def _catch_up_rows(
        self,
        inputs: DraftInputs,
        rows: np.ndarray,  # [n] int32 batch rows that have missed tokens
        counts: np.ndarray,  # [n] int32 how many each has missed
        model: DraftModel,
        max_position: int,
        build: BuildAttention,
    ) -> None:
        ends = np.cumsum(counts, dtype=np.int32)
        token_rows = np.repeat(rows, counts)  # [M] token -> batch row
        back = np.repeat(ends, counts) - np.arange(ends[-1], dtype=np.int32)  # [M] from the end
        tokens = self._host.upload(np.stack([token_rows, back]))
        starts = self._host.upload(np.concatenate([[0], ends]).astype(np.int32))  # [n + 1]
        missed = self._host.upload(rows)
        first = inputs.positions[inputs.query_start_loc[: inputs.num_reqs].long()]  # [N]
        positions = first[tokens[0]] - tokens[1]  # [M]
        slots = inputs.idx_mapping[tokens[0]].long()  # [M] token -> slot
        attention = build(
            counts.tolist(), starts, first[missed].int(), positions, inputs.idx_mapping[missed]
        )
        ids = inputs.requests.all_token_ids[slots, positions + self._shift]
        if self._ring is None:
            hidden = torch.zeros((len(ids), 1), dtype=self._host.dtype, device=ids.device)
        else:
            hidden = self._ring[slots, positions % self.capacity]
        # As in every pass, since the drafter may have fewer positions than the target.
        positions = positions.clamp(max=max_position - 1)
        model.write_kv(ids, positions, model.combine(hidden), attention)


def _groups(counts: np.ndarray, most_tokens: int) -> Iterator[np.ndarray]:
    """The rows with a count above 0, in groups of at most `most_tokens` tokens."""
    group: list[int] = []
    total = 0
    for row in np.flatnonzero(counts).tolist():
        if group and total + int(counts[row]) > most_tokens:
            yield np.array(group, dtype=np.int32)
            group, total = [], 0
        group.append(row)
        total += int(counts[row])
    if group:
        yield np.array(group, dtype=np.int32)
