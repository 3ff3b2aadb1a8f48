"""The matrices of a layer's experts for one product, in one of three forms."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.cpu.experts import NativeExperts
from ....kernels.cpu.formats import StoredRows
from ....kernels.cpu.matrix import Matrix
from ....kernels.cpu.weight import QuantizedWeight, pack_any
from ....kernels.device import card_of, is_card
from ....kernels.linear.experts import ExpertWeights, PackedExperts
from ....kernels.packed.kinds import can_group
from ....kernels.quant.packed import PackedWeight
from ....kernels.quant.stack import empty_stack, fill_rows
from ....kernels.quant.tiled import TiledWeight, Weight, has_kernels, prepare
from .packed import Packed, Part
from .slots import CheckpointSlot, matrix_slot
from .weight_format import WeightFormat

# Whether "mxfp4" gets the form that `kernels.packed.grouped.triton.hopper_experts` reads; None = on
# Hopper GPUs, which alone have that kernel.
NARROW: bool | None = None


def _wants_narrow(device: torch.device) -> bool:
    if NARROW is not None:
        return NARROW
    card = card_of(device)
    return card is not None and card.capability == (9, 0)


class ExpertStack(nn.Module):
    """A matrix [R, C] for each expert, which may arrive in parts of its rows.

    All of them are one float tensor, or one quantised weight below each other if the format is
    `packed`, or native weights of each expert. A stack of which not all parts have one quantised
    format becomes a float tensor.
    """

    weight: Tensor | None  # [E, R, C]

    def __init__(self, count: int, rows: int, columns: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.count, self.rows, self.columns, self.format = count, rows, columns, fmt
        self.packed: Packed | None = None
        self._native: list[dict[int, QuantizedWeight]] = [{} for _ in range(count)]
        self._matrices: list[Matrix] = []
        self._form: tuple[object, ...] = ()  # of the parts of a quantised weight
        self.expected_bytes: int | None = None  # of the weights, if known before they arrive
        self.narrow = False  # whether "mxfp4" gets the form for Hopper GPUs, see `choose_form`
        self._lock = threading.Lock()  # guards what loading threads change
        self.register_buffer("weight", None if fmt.packed or fmt.native else self._empty())

    def _empty(self) -> Tensor:
        size = self.count, self.rows, self.columns
        return torch.empty(size, dtype=self.format.dtype, device=self.format.device)

    def slot(self, expert: int, row: int, num_rows: int) -> CheckpointSlot:
        """The slot of some rows of an expert's matrix."""
        return matrix_slot((num_rows, self.columns), partial(self.take, expert, row), self.format)

    def whole_slot(self) -> CheckpointSlot:
        """The slot of all matrices in one float tensor [E, R, C]."""
        return CheckpointSlot((self.count, self.rows, self.columns), self.take_all)

    @property
    def matrices(self) -> list[Matrix]:
        if not self._matrices:
            parts = [[own[row] for row in sorted(own)] for own in self._native]
            self._matrices = [Matrix(own) for own in parts]
        return self._matrices

    @property
    def native_formats(self) -> set[str]:
        """The names of quantised formats among the native weights."""
        kinds = {part.type for own in self._native for part in own.values()}
        return {kind.name for kind in kinds if not kind.is_float}

    def widen(self) -> None:
        """Turn a quantised stack into a float tensor."""
        with self._lock:
            self._widen()

    def _widen(self) -> None:
        if self.weight is None:
            self.weight = self._empty()
        if self.packed is not None:
            numbers = self.packed.weight.dequantise(self.format.dtype)
            self.weight.view(-1, self.columns).copy_(numbers)
            self.packed = None

    def take_all(self, tensor: Tensor) -> None:
        """Take the float matrices [E, R, C] of all experts."""
        if self.format.native:
            for expert, own in enumerate(tensor):
                self.take(expert, 0, own)
            return
        with self._lock:
            self._widen()
        assert self.weight is not None
        self.weight.copy_(tensor)

    def take(self, expert: int, row: int, part: Part | StoredRows) -> None:
        """Take rows of an expert's matrix from `row` on."""
        if self.format.native:
            part = part.dequantise() if isinstance(part, PackedWeight) else part
            own = pack_any(part)
            with self._lock:
                self._native[expert][row] = own
                self._matrices = []
            return
        assert not isinstance(part, StoredRows)
        if part.device.type == "meta" and (self.packed is not None or self.weight is not None):
            return  # of thousands of parts, the first has the outline
        kept = self._kept(part, self.narrow)
        if isinstance(kept, Tensor):
            with self._lock:
                self._widen()
            assert self.weight is not None
            self.weight[expert, row : row + kept.shape[0]].copy_(kept)
            return
        form, weight = kept
        with self._lock:
            if self.packed is None and self.weight is None:
                self._form = form
                self.packed = Packed(empty_stack(weight, self.count * self.rows))
            if self.packed is not None and form == self._form:
                fill_rows(self.packed.weight, expert * self.rows + row, weight)
                return
        self.take(expert, row, weight.dequantise(self.format.dtype))

    def keeps(self, part: PackedWeight) -> bool:
        """Whether the stack can hold a matrix in its format: of each, kernels must know it, and
        activations in fp16 cannot be multiplied with every scale of MXFP4."""
        if not self.format.packed or part.order is not None:
            return False
        if part.scales.dtype == torch.uint8 and self.format.dtype == torch.float16:
            return False
        device = self.format.device
        return not is_card(device) or has_kernels(part, device)

    def _kept(self, part: Part, narrow: bool) -> Tensor | tuple[tuple[object, ...], Weight]:
        """A part as the stack holds it: numbers, or a quantised weight and its form."""
        if isinstance(part, Tensor):
            return part
        if not self.keeps(part):
            return part.dequantise(self.format.dtype)
        part = replace(part, activations="16bit", input_scale=None)
        if part.shape[0] % part.row_group:
            part = part.by_rows()
        made = prepare(part, narrow)
        in_spans = isinstance(made, TiledWeight) and made.narrow
        return (*part.form, part.row_group, in_spans), made


def choose_form(gate_up: ExpertStack, down: ExpertStack, activation: str) -> None:
    """Give both stacks the form for Hopper GPUs if the kernels that read it can compute these
    experts; for other kernels it would only be larger. To be called before weights arrive."""
    sizes = down.count, down.rows, gate_up.rows // 2
    narrow = _wants_narrow(down.format.device) and can_group(*sizes, activation)
    gate_up.narrow = down.narrow = narrow


def experts_of(
    gate_up: ExpertStack, down: ExpertStack, **rule: Any
) -> ExpertWeights | PackedExperts | NativeExperts:
    """The experts of a layer in the form that their weights arrived in. `rule` holds the other
    fields of `ExpertWeights`."""
    if gate_up.format.native:
        return NativeExperts(gate_up.matrices, down.matrices, **rule)
    first, last = gate_up.packed, down.packed
    if first is not None and last is not None:
        return PackedExperts(first.weight, last.weight, down.count, **rule)
    if first is not None or last is not None:  # one alone
        gate_up.widen()
        down.widen()
    assert gate_up.weight is not None and down.weight is not None
    return ExpertWeights(gate_up.weight, down.weight, **rule)
