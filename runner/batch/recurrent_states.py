"""Owns the recurrent states of all layers: a slot's working states, and the saved ones.

The working states are as permanent as the slots of the request table. `scheduling.state_snapshots`
decides which block holds which saved state. Slot R and block 0 belong to no request: the rows of
warm-up and capture, which belong to none either, write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.recurrent.rows import BLOCK, BORDER, LENGTH, DeltaState, StateTable
from ..attention.recurrent import RecurrentBuilder, RecurrentLayer
from ..scheduling.plan import StepPlan
from .host_copy import StagingPool
from .kv_cache import zeros


class RecurrentStates:
    """The tensors of R slots. A history holds the convolution's inputs and `log` tokens more."""

    def __init__(
        self,
        layers: Sequence[RecurrentLayer],
        max_num_reqs: int,
        log: int,
        dtype: torch.dtype,  # of activations
        device: torch.device,
    ) -> None:
        self.layers, self.log = list(layers), log
        self.num_blocks = 1  # of saved states, including the null block
        self._dtype, self._device, self._num_slots = dtype, device, max_num_reqs + 1
        self.table = StateTable(self._zeros(3, self._num_slots, dtype=torch.int32))
        self.states: dict[int, DeltaState] = {}
        for layer in layers:
            shape, (state, tail) = layer.shape, _sizes(layer)
            rows = (self._num_slots, shape.conv_width - 1 + log, shape.channels)
            self.states[layer.layer_id] = DeltaState(
                self._zeros(self._num_slots, *state, dtype=torch.float32),
                self._zeros(*rows, dtype=dtype),
                self._zeros(1, *state, dtype=torch.float32),
                self._zeros(1, *tail, dtype=dtype),
            )
        shapes = {layer.layer_id: layer.shape for layer in layers}
        self._pool = StagingPool(device)
        self.builder = RecurrentBuilder(
            self.table, self.states, shapes, log, max_num_reqs, self._pool.upload
        )

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return zeros(shape, dtype, self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the working states."""
        return sum(one.state.nbytes + one.history.nbytes for one in self.states.values())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one saved state, over all layers."""
        return sum(
            one.snapshots[0].nbytes + one.snapshot_tails[0].nbytes for one in self.states.values()
        )

    def allocate_snapshots(self, num_blocks: int) -> None:
        """Make room for saved states in `num_blocks` blocks, including the null block."""
        self.num_blocks = num_blocks
        for layer in self.layers:
            own, (state, tail) = self.states[layer.layer_id], _sizes(layer)
            self.states[layer.layer_id] = DeltaState(
                own.state,
                own.history,
                self._zeros(num_blocks, *state, dtype=torch.float32),
                self._zeros(num_blocks, *tail, dtype=self._dtype),
            )

    def apply(self, plan: StepPlan) -> None:
        """Prepare the slots of a plan's new requests, and note which states its rows save.

        A new request begins with a saved state, or with none. It runs before the step's rows are
        prepared, on the same stream.
        """
        changes: dict[int, tuple[int, int, int]] = {}  # slot -> LENGTH (-1 = keep), BORDER, BLOCK
        restored: list[tuple[int, int]] = []  # (slot, block)
        for new in plan.new_requests:
            changes[new.slot] = (new.num_computed_tokens, 0, 0)
            # The artificial requests of step timing have computed tokens, but no state.
            assert new.num_computed_tokens or not new.snapshot, "a state without a prefix"
            if new.snapshot:
                restored.append((new.slot, new.snapshot))
        for saved in plan.snapshots:
            length = changes.get(saved.slot, (-1, 0, 0))[0]
            changes[saved.slot] = (length, saved.border, saved.block)
        if changes:
            array = np.array([(slot, *values) for slot, values in changes.items()], dtype=np.int32)
            slots, *values = self._pool.upload(np.ascontiguousarray(array.T))
            kept = self.table.values[LENGTH, slots.long()]
            self.table.values[LENGTH].index_copy_(
                0, slots.long(), torch.where(values[LENGTH] < 0, kept, values[LENGTH])
            )
            for field in (BORDER, BLOCK):
                self.table.values[field].index_copy_(0, slots.long(), values[field])
        if restored:
            array = np.array(restored, dtype=np.int64)
            slots, blocks = self._pool.upload(np.ascontiguousarray(array.T))
            self._restore(slots, blocks)

    def _restore(self, slots: Tensor, blocks: Tensor) -> None:
        """Copy the saved states of `blocks` into `slots`, [restored] int64 each."""
        for own in self.states.values():
            own.state.index_copy_(0, slots, own.snapshots[blocks])
            tails = own.snapshot_tails[blocks]
            own.history[:, : tails.shape[1]].index_copy_(0, slots, tails)


def _sizes(layer: RecurrentLayer) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """The shapes of a layer's state and of its convolution's inputs."""
    shape = layer.shape
    state = (shape.num_value_heads, shape.key_dim, shape.value_dim)
    return state, (shape.conv_width - 1, shape.channels)
