"""Random weights for `--load-format dummy`, quantised where the model's config says so."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...configs.model.quantisation import Quantisation, Scheme
from ...kernels.quant.packed import NIBBLES, PackedWeight
from ..models.layers import CheckpointSlot
from .inspection import Progress, Stored
from .matching import slots_of_one_form
from .quantised.delivery import fitting, own_part

# The standard deviations of uniform random codes, by kind.
_DEVIATION = {"fp8": 0.59, "int8": 74.0, "int4": 4.6, "fp4": 2.93}


def load_random(
    slots: Mapping[str, CheckpointSlot],
    device: torch.device,
    seed: int,
    progress: Progress | None = None,
    std: float = 0.02,
    quantisation: Quantisation | None = None,
) -> None:
    """Fill `slots` with seeded random weights, drawn on the device; norms get ones, biases
    zeros. Matrices that `quantisation` names are packed if their slots take that."""
    slots = slots_of_one_form(slots)
    has_memory = device.type != "meta"
    generator = torch.Generator(device).manual_seed(seed) if has_memory else None
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    done, total = 0, sum(math.prod(slot.shape) for slot in slots.values()) * dtype.itemsize
    tell = progress or (lambda done, total: None)
    tell(0, total)
    with torch.no_grad():
        for name, slot in slots.items():
            scheme = _scheme(name, slot, quantisation)
            size = math.prod(slot.shape) * dtype.itemsize
            if scheme is not None:
                drawn: Stored = (
                    random_packed(slot.shape, scheme, device, generator, std)
                    if has_memory
                    else _outline(slot.shape, scheme)
                )
                if slot.cut is not None:
                    drawn = own_part(slot, drawn, slot.cut)
                slot.load(fitting(slot, drawn))
            else:
                tensor = torch.empty(slot.shape, dtype=dtype, device=device)
                if slot.init == "normal" and has_memory:
                    tensor.normal_(0, std, generator=generator)
                else:
                    tensor.fill_(1.0 if slot.init == "ones" else 0.0)
                slot.load(tensor if slot.cut is None else slot.cut.of(tensor))
            done += size
            tell(done, total)


def random_outline(
    name: str, slot: CheckpointSlot, quantisation: Quantisation | None
) -> PackedWeight | None:
    """A meta tensor for the packed weight that `load_random` draws; None if it draws none."""
    scheme = _scheme(name, slot, quantisation)
    return None if scheme is None else _outline(slot.shape, scheme)


@functools.lru_cache
def _outline(shape: tuple[int, ...], scheme: Scheme) -> PackedWeight:
    """Shared by equal matrices, because models with experts have thousands."""
    return random_packed(shape, scheme, torch.device("meta"), None)


def _scheme(name: str, slot: CheckpointSlot, quantisation: Quantisation | None) -> Scheme | None:
    if quantisation is None or slot.takes_packed is None or len(slot.shape) != 2:
        return None
    return quantisation.scheme_of(name.removesuffix(".weight"))


def random_packed(
    shape: tuple[int, ...],
    scheme: Scheme,
    device: torch.device,
    generator: torch.Generator | None,
    std: float = 0.02,
) -> PackedWeight:
    """A matrix [N, K] of random codes, with scales that give its numbers about the deviation
    `std`."""
    rows, columns = shape
    group = min(scheme.group or columns, columns)
    grid = (-(-rows // scheme.row_group), -(-columns // group))
    codes = -(-columns // 2) if scheme.kind in NIBBLES else columns
    values = torch.empty(rows, codes, dtype=torch.uint8, device=device)
    if not values.is_meta:
        values.random_(0, 256, generator=generator)
    fields: dict[str, Any] = {}
    scales: Tensor = torch.full(grid, std / _DEVIATION[scheme.kind], device=device)
    if scheme.kind == "fp8":
        # Bits of a small exponent and mantissa: numbers from -1.875 to 1.875.
        values = (values & 0b10111111).view(torch.float8_e4m3fn)
    elif scheme.kind == "fp4":
        if group == 16:
            fields["global_scale"] = torch.full((rows,), std / _DEVIATION["fp4"], device=device)
            scales = torch.ones(grid, device=device).to(torch.float8_e4m3fn)
        else:
            exponent = 127 + round(math.log2(std / _DEVIATION["fp4"]))
            scales = torch.full(grid, exponent, dtype=torch.uint8, device=device)
    else:
        scales = scales.bfloat16()
        values = values.view(torch.int8) if scheme.kind == "int8" else values
        if not scheme.symmetric:
            dtype = torch.int8 if scheme.kind == "int8" else torch.uint8
            middle = 0 if scheme.kind == "int8" else 8
            fields["zeros"] = torch.full(grid, middle, dtype=dtype, device=device)
    if scheme.activations == "fp8-static":
        fields["input_scale"] = torch.ones((), device=device)
    return PackedWeight(
        scheme.kind,  # type: ignore[arg-type]
        values,
        scales,
        columns,
        group,
        scheme.row_group,
        activations=scheme.activations,  # type: ignore[arg-type]
        **fields,
    )
