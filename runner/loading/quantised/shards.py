"""A rank's part of a stored weight: of one that was read whole, and of the stored tensors of a
quantised matrix, so that no more than the part is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ....configs.model.quantisation import Quantisation
from ....kernels.cpu import formats as rows_in_files
from ....kernels.quant import part as packed_parts
from ....kernels.quant.packed import BLOCK, PackedWeight
from ...parallel.ranks import Cut
from ..inspection import Stored

# Stored with the outputs along the second dimension.
_TRANSPOSED = ("qweight", "qzeros", "scales")
ORDERS = ("g_idx", "weight_g_idx")  # the group of each input feature
_UNITS = (1, 2, 4, 8, 16, 32, 64, BLOCK)  # rows or columns of a matrix to one of a stored tensor


def part_of(weight: Stored, cut: Cut) -> Stored | None:
    """A part of a weight in the weight's own form; None if the form cannot hold the part alone."""
    if isinstance(weight, Tensor):
        return cut.of(weight)
    spans = cut.spans
    if isinstance(weight, PackedWeight):
        if cut.dim == 0:
            return packed_parts.rows_of(weight, spans)
        return packed_parts.columns_of(weight, *spans[0]) if len(spans) == 1 else None
    if cut.dim == 0:
        return rows_in_files.rows_of(weight, spans)
    return rows_in_files.columns_of(weight, *spans[0]) if len(spans) == 1 else None


def leaf_cuts(
    shape: Sequence[int],  # [N, K]
    cut: Cut,
    leaves: Mapping[str, Sequence[int]],
    quantisation: Quantisation | None,
) -> dict[str, Cut | None] | None:
    """What to read of each stored tensor of a quantised matrix [N, K] for a part of it.

    `leaves` holds their shapes, by the last part of their names. None stands for the whole tensor.
    The result is None if the part does not end where the stored tensors can be cut.
    """
    found: dict[str, Cut | None] = {}
    for leaf, stored in leaves.items():
        dim = 1 - cut.dim if leaf in _TRANSPOSED else cut.dim
        is_whole = leaf in ("weight_shape", *ORDERS) or torch.Size(stored).numel() == 1
        if is_whole or dim >= len(stored):  # the last: one number for each row
            found[leaf] = None
            continue
        if len(stored) == 4 and stored[1] == stored[3] == 1:
            dim *= 2  # ModelOpt's scales of blocks
        elif len(stored) > 2:
            return None
        own = _scaled(cut, shape[cut.dim], stored[dim], dim, _units(cut.dim, quantisation))
        if own is None:
            return None
        found[leaf] = own if stored[dim] > 1 else None
    return found


def _units(dim: int, quantisation: Quantisation | None) -> tuple[int, ...]:
    block = None if quantisation is None else quantisation.block
    return _UNITS if block is None else (block[dim], *_UNITS)


def _scaled(cut: Cut, total: int, size: int, dim: int, units: Sequence[int]) -> Cut | None:
    """The part of a dimension of `size` that describes `total` rows or columns of a matrix."""
    if size == 1:
        return Cut(dim, 0, 1)
    unit = next((unit for unit in units if -(-total // unit) == size), None)
    if unit is None:
        return None
    ends = [end for span in cut.spans for end in span]
    if any(end % unit and end != total for end in ends):
        return None
    (start, stop), *more = [(start // unit, -(-stop // unit)) for start, stop in cut.spans]
    return Cut(dim, start, stop, tuple(more))


def num_groups(leaves: Mapping[str, Sequence[int]]) -> int:
    """The groups of columns of a matrix by the shapes of its stored tensors."""
    if "scales" in leaves:
        return leaves["scales"][0]
    scales = leaves["weight_scale"]
    return scales[1] if len(scales) > 1 else 1


def is_in_order(index: Tensor, count: int) -> bool:
    """Whether the `count` groups [K] of input features follow one another."""
    group = -(-len(index) // count)
    return torch.equal(index.long(), torch.arange(len(index)) // group)
