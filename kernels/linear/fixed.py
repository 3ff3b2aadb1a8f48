"""Chooses linear kernels whose rows have the same bits whatever the number of rows.

A tensor core adds the products of an element of the result in the order of K, 16 at a time, in
every tile that a choice here may have. K is never split, and torch, whose libraries choose kernels
by shape, computes nothing. `check_tiles` tests that claim on the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import card_of, use_triton
from .linear import linear
from .linear_choice import Choice, Fixed, Shape, fits
from .linear_tuned import LinearChooser

_LARGEST = 256  # rows of a tile for more rows than those of any other
_ROWS = (16, 32, 64, 128, _LARGEST)


class FixedChooser(LinearChooser):
    """Chooses a `Fixed` kernel for every shape; a layer that none fits is refused when loading."""

    def __init__(self) -> None:
        super().__init__({})

    def _look_up(self, shape: Shape, num_rows: int) -> Choice:
        choice = tiles_for(shape, num_rows)
        assert fits(choice, shape, num_rows), f"no fixed kernel computes {shape}"
        return choice


def tiles_for(shape: Shape, num_rows: int) -> Fixed:
    """The tiles of a layer of this shape, of 16-bit numbers, for `num_rows` rows."""
    block_m = next((rows for rows in _ROWS if num_rows <= rows), _LARGEST)
    small, gated = shape.inputs <= 1024, shape.role == "gate_up"
    if block_m == _LARGEST:
        return Fixed(64 if gated else 128, 64, 4, 8, 1, block_m)
    if small or block_m == 128:
        return Fixed(64, 64, 3 if gated else 4, 4, 1, block_m)
    if gated:
        return Fixed(64, 128 if block_m <= 32 else 64, 3, 4, 1, block_m)
    if shape.role == "head":
        return Fixed(128, 128 if block_m <= 32 else 64, 3, 4, 1, block_m)
    # One program for each multiprocessor: it must have enough bytes in flight alone.
    return Fixed(64, 256, 4, 4, 1, block_m) if block_m <= 32 else Fixed(64, 128, 5, 4, 1, block_m)


def unfit_layer(shapes: list[Shape]) -> Shape | None:
    """The first of these layers that no fixed kernel computes; None if all are computed."""
    return next((shape for shape in shapes if not fits(tiles_for(shape, 1), shape, 1)), None)


def create_fixed_chooser(device: torch.device, dtype: torch.dtype) -> FixedChooser | None:
    """The chooser for a device and the dtype of its activations; None if torch must compute."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return FixedChooser() if use_triton(torch.empty(0, device=device)) else None


def check_tiles(device: torch.device, dtype: torch.dtype) -> str | None:
    """A phrase that says which tiles round differently on this GPU; None if all agree.

    Multiplies random rows by random weights, as layers of each role with tiles of each size. Meta
    tensors have no values: with them it only launches the kernels.
    """
    if card_of(device) is None:
        return None
    is_real = device.type != "meta"
    generator = torch.Generator(device).manual_seed(0) if is_real else None

    def random(*shape: int) -> Tensor:
        if generator is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    for inputs, role in ((1024, "other"), (2112, "other"), (2112, "head")):
        x, weight = random(_LARGEST + 16, inputs), random(384, inputs)
        shape = Shape(role, 384, inputs)
        whole = linear(x, weight, None, tiles_for(shape, len(x)))
        for rows in _ROWS:
            own = linear(x[:rows].contiguous(), weight, None, tiles_for(shape, rows))
            if is_real and not torch.equal(own, whole[:rows]):
                return f"tiles of {rows} rows round differently from tiles of {_LARGEST}"
    return None
