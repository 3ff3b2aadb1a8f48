"""Owns every request's permanent row on the device: tokens, lengths, block tables, drafts.

A row (slot) is the request's for its whole life and is never moved; the scheduler chooses it. Host
changes are staged and applied at the start of a step, on the stream that runs the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .plan import NewRequest, StepPlan
from .sampling_state import SamplingState
from .staging import StagingPool

# int32 scalars of a slot; all live in one tensor so that one scatter writes them.
_SCALARS = ("prompt_len", "prefill_len", "total_len", "num_computed_tokens", "max_drafts")


class RequestTable:
    """R permanent rows. Also the `RequestRows` of a drafter and `RequestTensors` of the kernels."""

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        num_speculative_tokens: int,
        max_blocks: Sequence[int],  # per KV group
        device: torch.device,
        draft_vocab_size: int | None = None,  # not None: keep the drafts' distribution
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        reqs, groups = max_num_reqs, len(max_blocks)
        self.device = device
        self.max_num_reqs = reqs
        self.num_speculative_tokens = num_speculative_tokens
        self._scalars = zeros(len(_SCALARS) + groups, reqs)
        self.prompt_len = self._scalars[0]  # [R] prompt tokens
        self.prefill_len = self._scalars[1]  # [R] tokens to prefill before sampling
        self.total_len = self._scalars[2]  # [R] tokens known
        self.num_computed_tokens = self._scalars[3]  # [R] tokens whose KV is valid: the truth
        self.max_drafts = self._scalars[4]  # [R] cap on drafts; 0 = no speculation
        self.num_blocks = self._scalars[len(_SCALARS) :]  # [G, R]
        self.all_token_ids = zeros(reqs, max_model_len)  # prompt, then output
        self.block_tables = [zeros(reqs, blocks) for blocks in max_blocks]  # [R, max_blocks_g]
        self.last_sampled_tokens = zeros(reqs, dtype=torch.int64)  # KV not yet computed
        self.next_prefill_tokens = zeros(reqs, dtype=torch.int64)
        self.draft_tokens = torch.full(
            (reqs, num_speculative_tokens), -1, dtype=torch.int64, device=device
        )
        self.draft_logits: Tensor | None = None
        if draft_vocab_size is not None:
            shape = (reqs, num_speculative_tokens, draft_vocab_size)
            self.draft_logits = zeros(*shape, dtype=torch.float32)
        self.sampling = SamplingState(reqs, vocab_size, device)
        self.temperature: Tensor = self.sampling.temperature  # [R] float32
        self.seed: Tensor = self.sampling.seed  # [R] int64
        self._pool = StagingPool(device)
        self._staged: StepPlan | None = None
        # Host mirror of num_blocks: where a request's next block id goes. [G][R]
        self._num_blocks_cpu = [[0] * reqs for _ in range(groups)]

    def stage(self, plan: StepPlan) -> None:
        """Keep the changes of `plan` for `apply_staged`."""
        assert self._staged is None, "a plan was staged and never applied"
        self._staged = plan

    def apply_staged(self) -> None:
        """Write the staged changes: first free, then fill, so that a slot can do both at once."""
        plan, self._staged = self._staged, None
        assert plan is not None, "nothing is staged"
        new_slots = [new.slot for new in plan.new_requests]
        for slot in {*plan.freed_slots, *new_slots}:
            self.sampling.clear(slot)
        self._reset(new_slots)
        self._write_scalars_and_tokens(plan.new_requests)
        self._write_blocks(plan)
        for new in plan.new_requests:
            prompt, output = new.token_ids[: new.prompt_len], new.token_ids[new.prompt_len :]
            self.sampling.set_request(new.slot, new.sampling, prompt, output)

    def per_slot_tensors(self) -> list[tuple[Tensor, int, int]]:
        """(tensor, its slot dimension, value in a fresh row) of every array of this table."""
        tensors = [(self._scalars, 1, 0), (self.all_token_ids, 0, 0), (self.draft_tokens, 0, -1)]
        tensors += [(self.last_sampled_tokens, 0, 0), (self.next_prefill_tokens, 0, 0)]
        tensors += [(table, 0, 0) for table in self.block_tables]
        if self.draft_logits is not None:
            tensors.append((self.draft_logits, 0, 0))
        return tensors

    def _reset(self, slots: list[int]) -> None:
        """Give the rows of `slots` the values of a fresh row, in every array."""
        if not slots:
            return
        rows = self._pool.upload(np.array(slots, dtype=np.int64))  # [new] -> slot
        for tensor, dim, value in self.per_slot_tensors():
            tensor.index_fill_(dim, rows, value)
        for counts in self._num_blocks_cpu:
            for slot in slots:
                counts[slot] = 0

    def _write_scalars_and_tokens(self, new_requests: list[NewRequest]) -> None:
        scalars, tokens = _FlatWrites(self._scalars), _FlatWrites(self.all_token_ids)
        for new in new_requests:
            cap = new.sampling.speculative_max_tokens
            cap = self.num_speculative_tokens if cap is None else cap
            cap = min(cap, self.num_speculative_tokens) if new.sampling.speculative_enabled else 0
            known = len(new.token_ids)
            values = (new.prompt_len, known, known, new.num_computed_tokens, cap)
            for field, value in enumerate(values):
                scalars.add(field, new.slot, [value])
            tokens.add(new.slot, 0, new.token_ids)
        scalars.apply(self._pool)
        tokens.apply(self._pool)

    def _write_blocks(self, plan: StepPlan) -> None:
        appended = [(new.slot, new.block_ids) for new in plan.new_requests]
        appended += [(new.slot, new.block_ids) for new in plan.new_blocks]
        counts = _FlatWrites(self._scalars)
        for group, table in enumerate(self.block_tables):
            writes, lengths = _FlatWrites(table), self._num_blocks_cpu[group]
            touched = set()
            for slot, block_ids in appended:
                if block_ids[group]:
                    writes.add(slot, lengths[slot], block_ids[group])
                    lengths[slot] += len(block_ids[group])
                    touched.add(slot)
            for slot in touched:
                counts.add(len(_SCALARS) + group, slot, [lengths[slot]])
            writes.apply(self._pool)
        counts.apply(self._pool)


class _FlatWrites:
    """Collects (row, column, values) writes to a 2-D int32 tensor; applies them as one scatter."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._indices: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, column: int, values: Sequence[int]) -> None:
        rows, width = self._target.shape
        end = column + len(values)
        assert 0 <= row < rows and end <= width, f"write of [{row}, {column}:{end}] is out of range"
        self._indices.append(np.arange(row * width + column, row * width + end))
        self._values.append(np.asarray(values, dtype=np.int64))

    def apply(self, pool: StagingPool) -> None:
        if not self._indices:
            return
        packed = np.stack([np.concatenate(self._indices), np.concatenate(self._values)])
        indices, values = pool.upload(packed)  # [2, writes]
        self._target.view(-1).index_copy_(0, indices, values.int())
