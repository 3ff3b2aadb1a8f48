"""The request table: every request's permanent row on the device (tokens, lengths, blocks, drafts).

A row (slot) belongs to a request while it runs and is never moved; the scheduler chooses it.
Changes from the host are staged and applied at the start of a step, on the stream that runs the
steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..scheduling.plan import NewRequest, StepPlan
from .host_copy import StagingPool
from .sampling_state import SamplingState

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # in int32 words, of the arrays that share a tensor
_LONG = 16  # longer writes are kept as arrays, not as single values
# The int32 scalars of a slot, as rows of one array. The slot's block counts follow, one per group.
_SCALARS = ("prompt_len", "prefill_len", "total_len", "num_computed_tokens", "max_drafts")


class RequestTable:
    """R permanent rows. It implements the drafters' `RequestRows` and the kernels'
    `RequestTensors`."""

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        num_speculative_tokens: int,
        max_blocks: Sequence[int],  # per KV group
        device: torch.device,
        draft_vocab_size: int | None = None,  # None: do not keep the drafts' logits
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        reqs, groups = max_num_reqs, len(max_blocks)
        self.device = device
        self.max_num_reqs = reqs
        self.num_speculative_tokens = num_speculative_tokens
        # All int32 arrays that the host changes share one tensor, so that one scatter writes them.
        shapes = [(len(_SCALARS) + groups, reqs), (reqs, max_model_len)]
        shapes += [(reqs, blocks) for blocks in max_blocks]
        self._writes = _Writes(shapes, device)
        self._scalars, self.all_token_ids, *self.block_tables = self._writes.arrays
        self.prompt_len = self._scalars[0]  # [R] prompt tokens
        self.prefill_len = self._scalars[1]  # [R] tokens to prefill before sampling
        self.total_len = self._scalars[2]  # [R] tokens known
        # [R] tokens with valid KV; exact, unlike the host's
        self.num_computed_tokens = self._scalars[3]
        self.max_drafts = self._scalars[4]  # [R] limit on drafts; 0 = no speculation
        self.num_blocks = self._scalars[len(_SCALARS) :]  # [G, R]
        # all_token_ids is [R, max_model_len], prompt, then output; block_tables [R, max_blocks_g]
        # [R] the newest token, without KV yet
        self.last_sampled_tokens = zeros(reqs, dtype=torch.int64)
        self.next_prefill_tokens = zeros(reqs, dtype=torch.int64)
        self.draft_tokens = torch.full(
            (reqs, num_speculative_tokens), -1, dtype=torch.int64, device=device
        )
        self.draft_logits: Tensor | None = None
        if draft_vocab_size is not None:
            shape = (reqs, num_speculative_tokens, draft_vocab_size)
            # A drafter writes only the columns of ids that it can draw; the others stay at -inf.
            self.draft_logits = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
        self.sampling = SamplingState(reqs, vocab_size, device)
        self.temperature: Tensor = self.sampling.temperature  # [R] float32
        self.seed: Tensor = self.sampling.seed  # [R] int64
        self._pool = StagingPool(device)
        self._staged: StepPlan | None = None
        # [G][R] the host's copy of num_blocks, which is the column of a request's next block id
        self._num_blocks_cpu = [[0] * reqs for _ in range(groups)]

    def stage(self, plan: StepPlan) -> None:
        assert self._staged is None, "a plan was staged and never applied"
        self._staged = plan

    def apply_staged(self) -> dict[int, str]:
        """Write the staged changes. Slots are freed first, so that one step can reuse a freed slot.

        Returns an error sentence for each slot whose sampling parameters could not be stored, for
        example for lack of memory. Such a slot runs with neutral ones until its request is ended.
        """
        plan, self._staged = self._staged, None
        assert plan is not None, "nothing is staged"
        new_requests = plan.new_requests
        if new_requests or plan.freed_slots:
            new_slots = [new.slot for new in new_requests]
            for slot in {*plan.freed_slots, *new_slots}:
                self.sampling.clear(slot)
            self._reset(new_slots)
        for new in new_requests:
            self._add_scalars_and_tokens(new)
            self._add_blocks(new.slot, new.block_ids)
        for grown in plan.new_blocks:
            self._add_blocks(grown.slot, grown.block_ids)
        self._writes.apply(self._pool)
        faults = {}
        for new in new_requests:
            prompt, output = new.token_ids[: new.prompt_len], new.token_ids[new.prompt_len :]
            try:
                self.sampling.set_request(new.slot, new.sampling, prompt, output)
            except Exception as error:
                logger.exception("the sampling parameters of a request cannot be stored")
                self.sampling.clear(new.slot)
                kind = type(error).__name__
                faults[new.slot] = f"The request's parameters cannot be stored ({kind})."
        return faults

    def forget_drafts(self) -> None:
        """Clear every request's drafts. A new drafter may draw from other token ids."""
        self.draft_tokens.fill_(-1)
        if self.draft_logits is not None:
            self.draft_logits.fill_(float("-inf"))

    def per_slot_tensors(self) -> list[tuple[Tensor, int, float]]:
        """Every array of this table, as (tensor, its slot dimension, initial value)."""
        tensors: list[tuple[Tensor, int, float]] = [
            (self._scalars, 1, 0),
            (self.all_token_ids, 0, 0),
            (self.draft_tokens, 0, -1),
        ]
        tensors += [(self.last_sampled_tokens, 0, 0), (self.next_prefill_tokens, 0, 0)]
        tensors += [(table, 0, 0) for table in self.block_tables]
        if self.draft_logits is not None:
            tensors.append((self.draft_logits, 0, float("-inf")))
        return tensors

    def _reset(self, slots: list[int]) -> None:
        """Reset the rows of `slots` in every array to the initial values."""
        if not slots:
            return
        rows = self._pool.upload(np.array(slots, dtype=np.int64))  # [new] -> slot
        for tensor, dim, value in self.per_slot_tensors():
            tensor.index_fill_(dim, rows, value)
        for counts in self._num_blocks_cpu:
            for slot in slots:
                counts[slot] = 0

    def _add_scalars_and_tokens(self, new: NewRequest) -> None:
        cap = new.sampling.speculative_max_tokens
        cap = self.num_speculative_tokens if cap is None else cap
        cap = min(cap, self.num_speculative_tokens) if new.sampling.speculative_enabled else 0
        known = len(new.token_ids)
        values = (new.prompt_len, known, known, new.num_computed_tokens, cap)
        for field, value in enumerate(values):
            self._writes.add(_SCALARS_ARRAY, field, new.slot, [value])
        self._writes.add(_TOKENS_ARRAY, new.slot, 0, new.token_ids)

    def _add_blocks(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Append block ids, given per group, to a slot's block tables."""
        for group, ids in enumerate(block_ids):
            if ids:
                counts = self._num_blocks_cpu[group]
                self._writes.add(_TABLES_ARRAY + group, slot, counts[slot], ids)
                counts[slot] += len(ids)
                self._writes.add(_SCALARS_ARRAY, len(_SCALARS) + group, slot, (counts[slot],))


_SCALARS_ARRAY, _TOKENS_ARRAY, _TABLES_ARRAY = 0, 1, 2  # indices into `_Writes.arrays`


class _Writes:
    """Owns 2-D int32 arrays, collects writes to their rows and applies them as one scatter."""

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        starts = [0]
        for rows, width in shapes:
            starts.append(starts[-1] + -(-rows * width // _ALIGNMENT) * _ALIGNMENT)
        self._flat = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self._places = [
            (start, rows, width) for start, (rows, width) in zip(starts, shapes, strict=False)
        ]
        self.arrays = [
            self._flat[start : start + rows * width].view(rows, width)
            for start, rows, width in self._places
        ]
        self._indices: list[int] = []
        self._values: list[int] = []
        self._long: list[tuple[int, Sequence[int]]] = []  # (first index, values)

    def add(self, array: int, row: int, column: int, values: Sequence[int]) -> None:
        """Note a write of `values` to a row, from `column` on. Writes may not overlap."""
        start, rows, width = self._places[array]
        end = column + len(values)
        assert 0 <= row < rows and end <= width, f"write of [{row}, {column}:{end}] is out of range"
        first = start + row * width + column
        if len(values) > _LONG:
            self._long.append((first, values))
        else:
            self._indices += range(first, first + len(values))
            self._values += values

    def apply(self, pool: StagingPool) -> None:
        """Upload and scatter the collected writes; do nothing if there are none."""
        if not self._indices and not self._long:
            return
        indices = [np.array(self._indices, dtype=np.int64)]
        values = [np.array(self._values, dtype=np.int32)]
        for first, long in self._long:
            indices.append(np.arange(first, first + len(long)))
            values.append(np.array(long, dtype=np.int32))
        self._indices.clear()
        self._values.clear()
        self._long.clear()
        # One upload for both: the int64 indices as int32 words, then the values.
        index = np.concatenate(indices)
        words = pool.upload(np.concatenate([index.view(np.int32), *values]))
        count = len(index)
        self._flat.index_copy_(0, words[: 2 * count].view(torch.int64), words[2 * count :])
