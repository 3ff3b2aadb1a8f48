"""The destinations of checkpoint tensors in a model. Nothing here knows file formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...parallel.ranks import Cut
from .weight_format import WeightFormat


@dataclass(frozen=True)
class CheckpointSlot:
    """The destination of one checkpoint tensor.

    `load` accepts the tensor on any device and in any float dtype. Different slots may be loaded by
    several threads at once.
    """

    shape: tuple[int, ...]
    load: Callable[[Any], None]  # takes a Tensor, and what the fields below say
    init: str = "normal"  # initial values if weights are random: "normal", "ones" or "zeros"
    optional: bool = False  # the checkpoint may lack it
    takes_rows: bool = False  # `load` also accepts a matrix as a GGUF file stores it
    # What may be stored in one of several forms, and the form to which this tensor belongs. A
    # checkpoint has all tensors of one form; random weights are drawn for the first.
    form: tuple[str, str] | None = None
    takes_packed: torch.device | None = None  # `load` also accepts a PackedWeight on this device
    # The part of a tensor of `shape` that `load` takes, if other ranks take the rest.
    cut: Cut | None = None


def tensor_slot(target: Tensor, init: str = "normal") -> CheckpointSlot:
    """The slot of a tensor that is copied without a change of form."""

    def load(tensor: Tensor) -> None:
        target.copy_(tensor)

    return CheckpointSlot(tuple(target.shape), load, init)


@runtime_checkable
class TakesCheckpoint(Protocol):
    """A module with weights. `parent` is its parent's name and a dot, or empty; `name` is its
    own."""

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]: ...


def matrix_slot(
    shape: tuple[int, int], load: Callable[[Any], None], fmt: WeightFormat
) -> CheckpointSlot:
    """The slot of a matrix that is kept in its stored format if the model's format says so."""
    device = fmt.device if fmt.packed else None
    return CheckpointSlot(shape, load, takes_rows=fmt.native, takes_packed=device)


def module_slots(root: nn.Module) -> dict[str, CheckpointSlot]:
    """The slots of all modules below `root`, named by their path in the module tree."""
    slots: dict[str, CheckpointSlot] = {}
    for path, module in root.named_modules():
        if path and isinstance(module, TakesCheckpoint):
            parent, dot, own_name = path.rpartition(".")
            for name, slot in module.checkpoint_slots(f"{parent}{dot}", own_name):
                assert name not in slots, f"two modules load {name}"
                slots[name] = slot
    return slots
