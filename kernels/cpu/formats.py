"""GGUF's weight formats: names, block sizes and the numbers by which the native code knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class WeightType:
    """How a weight's numbers are stored. A row is a whole number of blocks."""

    name: str  # as in the gguf package
    code: int  # in native/formats.h
    block_size: int  # columns of a block
    block_bytes: int

    @property
    def is_native(self) -> bool:
        """Whether the native kernels multiply it."""
        return self.code >= 0

    @property
    def is_float(self) -> bool:
        """Whether numbers are plain floats, whose activations are not rounded."""
        return self.block_size == 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row in a file; ValueError if blocks do not fill it."""
        if columns % self.block_size:
            raise ValueError(
                f"rows of {columns} numbers are not a multiple of {self.name}'s block of "
                f"{self.block_size}"
            )
        return columns // self.block_size * self.block_bytes


_SIZES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
WEIGHT_TYPES = {
    name: WeightType(name, code, *sizes) for code, (name, sizes) in enumerate(_SIZES.items())
}
# What is also read from files, but not by native kernels.
STORED_TYPES = WEIGHT_TYPES | {"MXFP4": WeightType("MXFP4", -1, 32, 17)}


@dataclass(frozen=True)
class StoredRows:
    """A matrix as a file stores it, in one of `STORED_TYPES`.

    `order` [rows] int64, if given, says which stored row each row is.
    """

    type: WeightType
    data: np.ndarray  # [rows, row_bytes] uint8, contiguous
    columns: int
    order: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.data.shape != (self.data.shape[0], self.type.row_bytes(self.columns)):
            raise ValueError(f"{self.data.shape} bytes are not rows of {self.columns} numbers")

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns] of the numbers."""
        return self.data.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.data.nbytes


def rows_of(rows: StoredRows, spans: Sequence[tuple[int, int]]) -> StoredRows:
    """Return the rows of each span (start, stop), in the order of the spans."""
    order = rows.order
    if order is None and len(spans) == 1:
        return replace(rows, data=rows.data[slice(*spans[0])])
    wanted = np.concatenate([np.arange(*span) for span in spans])
    wanted = wanted if order is None else order[wanted]
    return replace(rows, data=rows.data[wanted], order=None)


def columns_of(rows: StoredRows, start: int, stop: int) -> StoredRows | None:
    """Return the columns from `start` to `stop`, or None if that would cut a block."""
    kind = rows.type
    if start % kind.block_size or stop % kind.block_size:
        return None
    data = rows.data[:, kind.row_bytes(start) : kind.row_bytes(stop)]
    return replace(rows, data=np.ascontiguousarray(data), columns=stop - start)


def with_zeros(rows: StoredRows, count: int) -> StoredRows:
    """Return the matrix with `count` more rows, whose numbers are 0, below its own.

    In every format, bytes of 0 mean zeros.
    """
    if rows.order is not None:
        rows = replace(rows, data=rows.data[rows.order], order=None)
    return replace(rows, data=np.pad(rows.data, ((0, count), (0, 0))))
