"""Takes some rows or columns of a packed matrix as a matrix of its own, and adds empty rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from .packed import HIGH_BITS, NIBBLES, SUPER, PackedWeight, concatenate

_BYTES = torch.uint8
_GROUPS = (64, 32, 16)  # sizes that larger groups of columns can be split into


def rows_of(weight: PackedWeight, spans: Sequence[tuple[int, int]]) -> PackedWeight:
    """Some rows (start, stop), below each other; they share no memory with the others.

    If a span cuts a block of scales, each row gets the scale of its block.
    """
    ends = [end for start, stop in spans for end in (start, stop)]
    if any(end % weight.row_group and end != weight.shape[0] for end in ends):
        weight = weight.by_rows()
    return concatenate([_rows(weight, start, stop) for start, stop in spans])


def _rows(weight: PackedWeight, start: int, stop: int) -> PackedWeight:
    block = weight.row_group
    scales = weight.scales[start // block : -(-stop // block)].clone()
    return weight.with_rows(lambda field: field[start:stop].clone(), scales)


def columns_of(weight: PackedWeight, start: int, stop: int) -> PackedWeight | None:
    """The columns from `start` to `stop`; they share no memory with the others.

    None if they are no whole groups, even after groups were split, or not whole bytes, or if the
    matrix stores columns in another order than that of its inputs: then a group belongs to
    features that are anywhere.
    """
    if weight.order is not None:
        return None
    bits = HIGH_BITS.get(weight.kind, 4 if weight.kind in NIBBLES else 8)  # of the smallest plane
    if start * bits % 8 or (stop * bits % 8 and stop != weight.columns):
        return None

    def bytes_of(plane: Tensor, bits: int) -> Tensor:
        return plane[:, start * bits // 8 : -(-stop * bits // 8)].contiguous()

    values = bytes_of(weight.values, max(bits, 4))
    high = None if weight.high is None else bytes_of(weight.high, bits)
    if weight.group >= weight.columns:
        size = stop - start
        return replace(weight, values=values, high=high, columns=size, group=size)
    group, last = weight.group, stop == weight.columns
    if start % SUPER or (stop % SUPER and not last):
        weight = weight.one_level()
    if start % group or (stop % group and not last):
        shared = math.gcd(group, start, group if last else stop)
        group = next((size for size in _GROUPS if shared % size == 0 and size < group), 0)
        if not group or weight.kind == "fp4":  # whose kinds of scales have one size each
            return None
        weight = _regrouped(weight.by_rows(), group)

    def cut(tensor: Tensor | None, size: int = group) -> Tensor | None:
        return None if tensor is None else tensor[:, start // size : -(-stop // size)].contiguous()

    scales = cut(weight.scales)
    assert scales is not None
    return replace(
        weight,
        values=values,
        scales=scales,
        columns=stop - start,
        group=min(group, stop - start),
        zeros=cut(weight.zeros),
        offsets=cut(weight.offsets),
        super_scales=cut(weight.super_scales, SUPER),
        super_offsets=cut(weight.super_offsets, SUPER),
        high=high,
    )


def _regrouped(weight: PackedWeight, group: int) -> PackedWeight:
    """The same numbers in smaller groups of columns, `group` of which are one of the old."""
    count = -(-weight.columns // group)

    def split(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.repeat_interleave(weight.group // group, 1)[:, :count].contiguous()

    scales = split(weight.scales)
    assert scales is not None
    zeros, offsets = split(weight.zeros), split(weight.offsets)
    return replace(weight, scales=scales, group=group, zeros=zeros, offsets=offsets)


def with_empty_rows(weight: PackedWeight, num_rows: int) -> PackedWeight:
    """The matrix with rows of zeros below its own, `num_rows` in all."""
    missing = num_rows - weight.shape[0]
    if not missing:
        return weight
    weight = weight.by_rows()

    def fill(tensor: Tensor) -> Tensor:
        if tensor.dtype.itemsize > 1:
            return functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))
        stored = tensor.view(dtype=_BYTES)  # which torch pads on every device
        return functional.pad(stored, (0, 0, 0, missing)).view(tensor.dtype)

    return weight.with_rows(fill, fill(weight.scales))
