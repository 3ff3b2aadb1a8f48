"""Quantised matrices of one format below each other in one weight, filled one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .tiled import TiledWeight, Weight


def _row_fields(weight: Weight) -> dict[str, tuple[Tensor, int, int]]:
    """The tensors that describe rows: name -> (tensor, dimension of rows, rows to an entry)."""
    tiled = isinstance(weight, TiledWeight)
    by_column = int(tiled and weight.kind != "fp4")  # the dimension of rows of scales
    names = {
        "words" if tiled else "values": (0, 1),
        "scales": (by_column, weight.row_group),
        "zeros": (int(tiled), 1),
        "offsets": (int(tiled), 1),
        "global_scale": (0, 1),
        "super_scales": (int(tiled), 1),
        "super_offsets": (int(tiled), 1),
        "high": (0, 1),
    }
    if tiled:
        names["factors"] = (0, 64)
    found = {name: (getattr(weight, name), *where) for name, where in names.items()}
    return {name: field for name, field in found.items() if field[0] is not None}


def empty_stack(like: Weight, num_rows: int) -> Weight:
    """A weight of the format of another one with `num_rows` rows, whose memory is not filled.

    `num_rows` and the rows of all parts must be whole blocks of rows that share scales.
    """
    assert like.order is None and num_rows % like.row_group == 0
    fields: dict[str, Any] = {}
    for name, (tensor, dim, rows) in _row_fields(like).items():
        shape = list(tensor.shape)
        shape[dim] = num_rows // rows
        fields[name] = tensor.new_empty(shape)
    return replace(like, **fields)


def fill_rows(stack: Weight, start: int, part: Weight) -> None:
    """Copy a matrix into the rows of a stack from `start` on."""
    parts = _row_fields(part)
    for name, (tensor, dim, rows) in _row_fields(stack).items():
        source = parts[name][0]
        assert start % rows == 0
        tensor.narrow(dim, start // rows, source.shape[dim]).copy_(source)
