"""A quantised weight matrix in the one form in memory that all checkpoint formats are turned into.

A value is (code - zero) * scale + offset. The code is what `kind` stores, and a weight has zeros,
offsets or neither. Nothing here knows checkpoint formats; the multiplication is in
`kernels.packed.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Kind: TypeAlias = Literal["fp8", "int8", "int4", "fp4", "int5", "int6"]
Activations: TypeAlias = Literal["16bit", "fp8-token", "fp8-block", "int8-token", "fp8-static"]
NIBBLES = ("int4", "fp4")  # kinds with two codes in a byte
HIGH_BITS = {"int5": 1, "int6": 2}  # kinds with a second plane, and its bits of a code
# The zero of a weight without `zeros` and `offsets`.
SYMMETRIC_ZERO = {"int4": 8, "int5": 16, "int6": 32, "int8": 0}
BLOCK = 128  # rows and columns of a block of fp8 values that share a scale
SUPER = 256  # columns that share a super scale
# Fields of a `PackedWeight`, besides scales, that have a row for each of the matrix.
_BY_ROW = ("values", "zeros", "offsets", "global_scale", "super_scales", "super_offsets", "high")
_PIECE_VALUES = 1 << 24  # values dequantised at once, so that float32 copies stay small


@dataclass(frozen=True)
class PackedWeight:
    """One matrix [N, K] of codes of 4, 5, 6 or 8 bits with scales. Fields that are None are absent.

    `kind` says what `values` holds:

    - "fp8": float8_e4m3fn [N, K].
    - "int8": int8 [N, K].
    - "int4": uint8 [N, ceil(K / 2)], two codes 0 to 15 in a byte, the even column in the low
      nibble. Without `zeros` and `offsets` the value of a code q is (q - 8) * scale.
    - "fp4": uint8 [N, ceil(K / 2)], two e2m1 numbers in a byte in the same order.
    - "int5" and "int6": the low 4 bits of codes as of "int4"; `high` has the other bit or two.
      Without `offsets` the value of a code q is (q - 16) * scale, or (q - 32) * scale.
    """

    kind: Kind
    values: Tensor
    # [ceil(N / row_group), ceil(K / group)] float32, float16 or bfloat16; of "fp4" also
    # float8_e4m3fn, or uint8 that holds e8m0 (2 ** (s - 127)); with `super_scales` an integer type
    scales: Tensor
    columns: int  # K
    group: int  # columns that share a scale: 16, 32, 64, 128, or K
    row_group: int = 1  # rows that share a scale: 1, or 128 (fp8 blocks)
    zeros: Tensor | None = None  # [N, ceil(K / group)] uint8 or int8; "int4" and "int8" only
    offsets: Tensor | None = None  # [N, ceil(K / group)] in the dtype of `scales`; not with `zeros`
    global_scale: Tensor | None = None  # [N] float32, multiplied with the scales of "fp4"
    order: Tensor | None = None  # [K] int32: stored column j belongs to input feature order[j]
    activations: Activations = "16bit"  # what the checkpoint asks for
    input_scale: Tensor | None = None  # [] float32, of "fp8-static": x / input_scale is cast to fp8
    # [N, ceil(K / 256)] float16, multiplied with the scales and the offsets, which are integers of
    # 8 bits then; not of kinds of floats
    super_scales: Tensor | None = None
    super_offsets: Tensor | None = None  # with `super_scales` and `offsets`
    # of "int5" and "int6": uint8 [N, ceil(K / 8)] or [N, ceil(K / 4)], the bits above the low 4 of
    # codes, those of the first column lowest
    high: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        stored = columns if self.kind in ("fp8", "int8") else -(-columns // 2)
        assert self.values.shape == (rows, stored), (self.kind, self.values.shape, columns)
        assert (self.high is None) == (self.kind not in HIGH_BITS)
        if self.high is not None:
            assert self.high.shape == (rows, -(-columns * HIGH_BITS[self.kind] // 8))
        grid = (-(-rows // self.row_group), -(-columns // self.group))
        assert self.scales.shape == grid, (self.scales.shape, grid)
        assert self.row_group == 1 or self.zeros is self.offsets is None
        for grouped in (self.zeros, self.offsets):
            assert grouped is None or grouped.shape == (rows, grid[1])
        assert self.zeros is None or (self.kind in SYMMETRIC_ZERO and self.offsets is None)
        assert self.global_scale is None or self.global_scale.shape == (rows,)
        assert self.order is None or self.order.shape == (columns,)
        for supers in (self.super_scales, self.super_offsets):
            assert supers is None or supers.shape == (rows, -(-columns // SUPER))
        assert self.super_scales is None or SUPER % self.group == 0
        assert (self.super_offsets is None) == (self.super_scales is None or self.offsets is None)

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the numbers."""
        return self.values.shape[0], self.columns

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are not None."""
        return tuple(field for field in vars(self).values() if isinstance(field, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All numbers [N, K], with columns in the order of input features.

        Each is computed in float32 and rounded once.
        """
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype, device=self.device)
        step = max(_PIECE_VALUES // max(columns, 1) // self.row_group, 1) * self.row_group
        for start in range(0, rows, step):
            out[start : start + step] = self._numbers(slice(start, start + step))
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers of rows `ids` [n] int32 or int64: [n, K]."""
        return self._numbers(ids.long()).to(dtype)

    def first_rows(self, count: int) -> PackedWeight:
        """The matrix of the first `count` rows; shares the memory of this one."""
        if count == self.shape[0]:
            return self

        scales = self.scales[: -(-count // self.row_group)]
        return self.with_rows(lambda field: field[:count], scales)

    def with_rows(self, change: Callable[[Tensor], Tensor], scales: Tensor) -> PackedWeight:
        """The matrix with other rows: what `change` makes of each field by row, and `scales`."""
        present = {name: getattr(self, name) for name in _BY_ROW}
        fields: dict[str, Any] = {
            name: change(field) for name, field in present.items() if field is not None
        }
        return replace(self, scales=scales, **fields)

    def one_level(self) -> PackedWeight:
        """The same numbers without super scales; scales and offsets are float32."""
        if self.super_scales is None:
            return self
        every = slice(None)
        return replace(
            self,
            scales=self._wide_scales(every).contiguous(),
            offsets=None if self.offsets is None else self._wide_offsets(every).contiguous(),
            super_scales=None,
            super_offsets=None,
        )

    def by_rows(self) -> PackedWeight:
        """The same numbers with `row_group` 1."""
        if self.row_group == 1:
            return self
        scales = self.scales.repeat_interleave(self.row_group, 0)[: self.shape[0]].contiguous()
        return replace(self, scales=scales, row_group=1)

    def _numbers(self, at: slice | Tensor) -> Tensor:
        """Rows `at` in float32, in the order of input features."""
        codes = self._codes(at)
        wide = self._wide_scales(at)
        if self.zeros is not None:
            codes = codes - self._spread(self.zeros[at])
        elif self.offsets is None and SYMMETRIC_ZERO.get(self.kind):
            codes = codes - SYMMETRIC_ZERO[self.kind]
        numbers = codes * self._spread(wide)
        if self.offsets is not None:
            numbers += self._spread(self._wide_offsets(at))
        if self.order is not None:
            ordered = torch.empty_like(numbers)
            ordered[:, self.order.long()] = numbers
            numbers = ordered
        return numbers

    def _codes(self, at: slice | Tensor) -> Tensor:
        """The stored values of rows `at` as float32 [n, K]."""
        values = _taken(self.values, at)
        if self.kind in ("fp8", "int8"):
            return values.float()
        codes = torch.stack((values & 15, values >> 4), -1).flatten(1)[:, : self.columns]
        if self.high is not None:
            codes |= unpack_bits(self.high[at], HIGH_BITS[self.kind])[:, : self.columns] << 4
        return e2m1_numbers(codes) if self.kind == "fp4" else codes.float()

    def _wide_scales(self, at: slice | Tensor) -> Tensor:
        """The scales of rows `at` in float32, [n, ceil(K / group)]."""
        scales = self.scales
        if self.row_group == 1:
            scales = _taken(scales, at)
        elif isinstance(at, Tensor):
            scales = scales[at // self.row_group]
        else:
            rows = torch.arange(self.shape[0], device=self.device)[at]
            scales = scales[rows // self.row_group]
        if self.kind == "fp4" and scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.float()
        if self.super_scales is not None:
            return scales * self._by_group(self.super_scales[at])
        return scales if self.global_scale is None else scales * self.global_scale[at, None]

    def _wide_offsets(self, at: slice | Tensor) -> Tensor:
        """The offsets of rows `at` in float32, [n, ceil(K / group)]."""
        assert self.offsets is not None
        offsets = self.offsets[at].float()
        if self.super_offsets is None:
            return offsets
        return offsets * self._by_group(self.super_offsets[at])

    def _by_group(self, supers: Tensor) -> Tensor:
        """Super scales [n, ceil(K / 256)] in float32, [n, ceil(K / group)]."""
        wide = supers.float().repeat_interleave(SUPER // self.group, 1)
        return wide[:, : self.scales.shape[1]]

    def _spread(self, grouped: Tensor) -> Tensor:
        """Repeat [n, ceil(K / group)] for each column of a group; broadcasts if one is enough."""
        if grouped.shape[1] == 1:
            return grouped
        wide = grouped.unsqueeze(-1).expand(*grouped.shape, self.group).flatten(1)
        return wide[:, : self.columns]

    @property
    def form(self) -> tuple[object, ...]:
        """What parts of one matrix must have in common, besides the order of columns."""
        dtypes = (self.values.dtype, self.scales.dtype)
        optional = self.zeros, self.offsets, self.global_scale, self.order, self.super_scales
        present = tuple(None if field is None else field.dtype for field in optional)
        return self.kind, self.columns, self.group, dtypes, present, self.activations


def _taken(tensor: Tensor, at: slice | Tensor) -> Tensor:
    """Rows `at`; torch does not index 8-bit floats by tensors on every device."""
    if isinstance(at, slice) or tensor.dtype.itemsize > 1:
        return tensor[at]
    return tensor.view(torch.uint8)[at].view(tensor.dtype)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes [n, K] uint8 of 1, 2 or 4 bits, the first lowest: uint8 [n, ceil(K * bits / 8)]."""
    count = 8 // bits
    padded = functional.pad(codes, (0, -codes.shape[1] % count)).view(codes.shape[0], -1, count)
    packed = torch.zeros_like(padded[..., 0])
    for index in range(count):
        packed |= padded[..., index] << index * bits
    return packed


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The codes of `pack_bits`: [n, 8 / bits times the bytes]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).view(len(packed), -1)


def e2m1_numbers(codes: Tensor) -> Tensor:
    """The numbers of 4-bit codes: sign, two bits of exponent, one of mantissa. Returns float32."""
    exponent, mantissa = codes >> 1 & 3, (codes & 1).float()
    magnitude = torch.where(exponent == 0, mantissa * 0.5, (mantissa + 2) * (1 << exponent) * 0.25)
    return torch.where(codes > 7, -magnitude, magnitude)


def can_concatenate(parts: Sequence[PackedWeight]) -> bool:
    """Whether matrices are of one format and one column order, so that they can be one matrix."""
    first = parts[0]
    return all(
        part.form == first.form and _same_order(part.order, first.order) for part in parts[1:]
    )


def _same_order(order: Tensor | None, other: Tensor | None) -> bool:
    """Whether two orders, of which none or both are None, are equal; meta tensors count as so."""
    if order is None or other is None or order is other or order.is_meta:
        return True
    return torch.equal(order, other)


def concatenate(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Matrices of one format, below each other. `can_concatenate` must be True.

    Block scales are repeated for each row unless every part but the last fills its blocks. The
    static scale of inputs becomes the largest one.
    """
    assert can_concatenate(parts)
    if len(parts) == 1:
        return parts[0]
    row_groups = {part.row_group for part in parts}
    if len(row_groups) > 1 or any(part.shape[0] % part.row_group for part in parts[:-1]):
        parts = [part.by_rows() for part in parts]

    fields: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("scales", *_BY_ROW)
        if getattr(parts[0], name) is not None
    }
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    return replace(parts[0], **fields, input_scale=torch.stack(inputs).amax() if inputs else None)
