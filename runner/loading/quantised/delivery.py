"""Turns stored weights into a form that their slots take, and logs what that costs."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import torch
from torch import Tensor

from ....kernels.cpu.formats import StoredRows
from ....kernels.device import is_card
from ....kernels.quant.packed import PackedWeight
from ....kernels.quant.tiled import has_kernels
from ...models.layers import CheckpointSlot
from ...parallel.ranks import Cut
from ..inspection import Stored
from ..matching import is_part
from .shards import part_of

logger = logging.getLogger(__name__)


def fitting(slot: CheckpointSlot, weight: Stored, device: torch.device | None = None) -> Stored:
    """`weight` in the first of these forms that the slot takes: its own, another one that is as
    small, a float tensor.

    A GPU gets packed weights only in formats for which it has kernels. `device` is where the
    weight will be, by default the device that the slot names.
    """
    device = device or slot.takes_packed
    if isinstance(weight, StoredRows) and not slot.takes_rows and slot.takes_packed is not None:
        from .gguf import packed_rows

        weight = packed_rows(weight, slot.takes_packed)
    if isinstance(weight, PackedWeight):
        if slot.takes_packed is not None and device is not None and _multiplies(weight, device):
            return weight
        if slot.takes_rows:
            from .rows import stored_rows_of

            if (rows := stored_rows_of(weight)) is not None:
                return rows
    elif isinstance(weight, StoredRows) and slot.takes_rows and weight.type.is_native:
        return weight
    return widened(weight)


def own_part(slot: CheckpointSlot, weight: Stored, cut: Cut) -> Stored:
    """Cut a part out of a weight.

    The result has the weight's own form if that can hold the part alone, else the packed form if
    the slot takes that, else it is a float tensor.
    """
    part = part_of(weight, cut)
    if part is None and isinstance(weight, StoredRows) and slot.takes_packed is not None:
        from .gguf import packed_rows

        part = part_of(packed_rows(weight, slot.takes_packed), cut)
    return cut.of(widened(weight)) if part is None else part


def _multiplies(weight: PackedWeight, device: torch.device) -> bool:
    """Whether the device multiplies a packed weight; references do on those without kernels."""
    return not is_card(device) or has_kernels(weight, device)


def widened(weight: Stored) -> Tensor:
    """A stored weight as a float tensor; quantised ones in float32."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, PackedWeight):
        if weight.device.type == "meta":
            return torch.empty(weight.shape, device="meta")
        return weight.dequantise(torch.float32)
    from ..gguf_values import values_of

    return values_of(weight)


def as_meta(weight: Stored) -> Tensor | PackedWeight:
    """Return a weight of the meta device with the shape and format that it will have on a GPU.

    Nothing is read from the file.
    """
    if isinstance(weight, StoredRows):
        from .gguf import packed_rows

        return packed_rows(weight, torch.device("meta"))
    return weight


class Deliveries:
    """Counts the quantised matrices of a checkpoint by what became of them."""

    def __init__(self, source: str) -> None:
        self._source, self._lock = source, threading.Lock()
        self._counts: Counter[str] = Counter()
        self._widened = ""  # the first name

    def deliver(self, slot: CheckpointSlot, name: str, weight: Stored) -> None:
        """Load a weight into its slot. May be called by several threads at once."""
        if slot.cut is not None and not is_part(weight, slot):
            weight = own_part(slot, weight, slot.cut)
        given = fitting(slot, weight)
        stored = isinstance(weight, StoredRows) and not weight.type.is_float
        if isinstance(weight, PackedWeight) or (stored and slot.takes_packed is not None):
            with self._lock:
                kept = not isinstance(given, Tensor)
                self._counts[_form(given)] += 1
                self._widened = self._widened or ("" if kept else name)
        slot.load(given)

    def report(self) -> None:
        """Log one line about quantised matrices, if any were packed or widened."""
        if not self._counts:
            return
        forms = ", ".join(f"{count} {form}" for form, count in sorted(self._counts.items()))
        example = f"; widened is, for example, {self._widened}" if self._widened else ""
        logger.info("quantised matrices of %s: %s%s", self._source, forms, example)


def _form(given: Stored) -> str:
    if isinstance(given, PackedWeight):
        return f"kept as {given.kind}"
    return f"kept as {given.type.name}" if isinstance(given, StoredRows) else "widened to floats"
