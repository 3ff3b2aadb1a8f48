"""A quantised matrix with its codes in the order in which the GPU kernels read them.

A word of 16 bits holds one code of each of 2 or 4 slices, so that a tile of words becomes tiles of
numbers by shifts and masks alone: no code moves to another lane or register. `tile` converts a
`PackedWeight` once, at load; `TiledWeight.packed` converts back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..device import card_of, use_triton
from .packed import HIGH_BITS, NIBBLES, Activations, Kind, PackedWeight
from .planes import (
    STEP_SLICES,
    by_group,
    has_small_planes,
    plane_values,
    plane_words,
    side_by_side,
    words_of_row,
)
from .planes import WIDTH as PLANE_WIDTH

# Bits of a word at which the code of each slice of "fp4" has its fields, of 3 bits, and its sign.
FP4_FIELDS, FP4_SIGNS = (6, 3, 0, 12), (15, 11, 9, 10)
MOST_EXPONENT, FACTOR_DIVISOR = 144, 65536.0  # see `factors_of_blocks`
# Fields of a `TiledWeight`, besides scales, whose first or second dimension is the matrix's rows.
_BY_ROW = ("words", "global_scale", "high")
_BY_COLUMN = ("zeros", "offsets", "super_scales", "super_offsets")
_PIECE_VALUES = 1 << 24  # codes converted at once, so that the copies stay small


@dataclass(frozen=True)
class TiledWeight:
    """One matrix [N, K] of codes in words, and the scales as `PackedWeight` describes them.

    A span of `slices * slice_width` columns is `slice_width` words. Bits i * 16 / slices and up of
    word j hold the code of column i * slice_width + j of the span; of "fp4", `FP4_FIELDS` and
    `FP4_SIGNS` say which bits. K is padded to whole spans with zeros.

    Kinds with a second plane have their words in `words` and `high`, see `planes`. Scales and
    offsets of these, and of other groups of 32 columns without zeros, are [ceil(groups / P), N, P]:
    P neighbouring groups of a row have 4 bytes together.
    """

    kind: Kind
    words: Tensor  # [N, spans * slice_width] int16
    scales: Tensor  # [groups, N or N / row_group], but [N, groups] of "fp4"
    columns: int  # K
    group: int
    row_group: int = 1
    zeros: Tensor | None = None  # [groups, N] uint8
    offsets: Tensor | None = None  # [groups, N]; not with `zeros`
    global_scale: Tensor | None = None  # [N] float32
    order: Tensor | None = None  # [K] int32
    activations: Activations = "16bit"
    input_scale: Tensor | None = None  # [] float32
    super_scales: Tensor | None = None  # [ceil(K / 256), N] float16
    super_offsets: Tensor | None = None  # [ceil(K / 256), N] float16
    narrow: bool = False  # of experts: slices of 16 columns
    factors: Tensor | None = None  # [N / 64, ceil(K / 256), 128] int32, see `factors_of_blocks`
    high: Tensor | None = None  # [N, spans * 16] int16, of kinds with a second plane
    # [N / 128, K / 128] float32: `scales` of blocks once more, as torch's products of codes want it
    by_rows: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the numbers."""
        return self.words.shape[0], self.columns

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def slices(self) -> int:
        """Codes in a word; of kinds with two planes, slices that kernels take at once."""
        return slices_of(self.kind)

    @property
    def slice_width(self) -> int:
        """Words of a row in a span."""
        return 16 if self.narrow else slice_width(self.kind, self.group, self.columns)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are not None."""
        return tuple(field for field in vars(self).values() if isinstance(field, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def packed(self) -> PackedWeight:
        """The same matrix in the form that it was made of."""
        high, offsets = None, self.offsets
        if self.high is not None:
            values, high = plane_values(self.words, self.high, self.kind, self.columns)
        else:
            values = _values(self.words, self)
        if self.scales.dim() == 3:
            groups = -(-self.columns // self.group)
            scales = by_group(self.scales, groups)
            offsets = None if offsets is None else by_group(offsets, groups)
        else:
            scales = self.scales if self.kind == "fp4" else self.scales.T
            offsets = None if offsets is None else offsets.T
        return PackedWeight(
            self.kind,
            values,
            scales,
            self.columns,
            self.group,
            self.row_group,
            zeros=None if self.zeros is None else self.zeros.T,
            offsets=offsets,
            global_scale=self.global_scale,
            order=self.order,
            activations=self.activations,
            input_scale=self.input_scale,
            super_scales=None if self.super_scales is None else self.super_scales.T,
            super_offsets=None if self.super_offsets is None else self.super_offsets.T,
            high=high,
        )

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All numbers [N, K], with columns in the order of input features."""
        return self.packed().dequantise(dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers of rows `ids` [n]: [n, K]."""
        at = ids.long()
        return replace(self._some(at, at // self.row_group), row_group=1).dequantise(dtype)

    def first_rows(self, count: int) -> TiledWeight:
        """The matrix of the first `count` rows; shares the memory of this one."""
        return self._some(slice(count), slice(-(-count // self.row_group)))

    def _some(self, rows: slice | Tensor, blocks: slice | Tensor) -> TiledWeight:
        """Some rows, and of scales the blocks that these are in."""
        fields: dict[str, Any] = {
            name: field[rows] if name in _BY_ROW else field[:, rows]
            for name in (*_BY_ROW, *_BY_COLUMN)
            if (field := getattr(self, name)) is not None
        }
        scales = self.scales[rows] if self.kind == "fp4" else self.scales[:, blocks]
        return replace(self, scales=scales, factors=None, by_rows=None, **fields)


Weight = PackedWeight | TiledWeight


def prepare(weight: PackedWeight, narrow: bool = False) -> Weight:
    """The form of a weight that the kernels of its device read; to be called once, at load.

    It is the same weight if there are no kernels for its format or device. `narrow`: see `tile`.
    """
    if not has_kernels(weight, weight.device):
        return weight
    return tile(weight, narrow and can_be_narrow(weight))


def has_kernels(weight: PackedWeight, device: torch.device) -> bool:
    """Whether kernels of a device multiply the format of a matrix, wherever the matrix is."""
    return can_tile(weight) and _has_kernels(device)


def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: Hopper, or Triton's interpreter."""
    card = card_of(device)
    if card is not None and card.capability[0] != 9:
        return False
    return use_triton(torch.empty(0, device=device))


def slices_of(kind: Kind) -> int:
    """Codes in a word of 16 bits; of kinds with two planes, slices that kernels take at once."""
    if kind in HIGH_BITS:
        return STEP_SLICES
    return 4 if kind in NIBBLES else 2


def slice_width(kind: Kind, group: int, columns: int) -> int:
    """Columns of a slice: at most 64, and of "int4" and "int8" at most a group.

    The tile of a slice has 64 columns because that is a line of 128 bytes. Scales of "fp4" are
    multiplied with the numbers, the others with sums over a whole slice.
    """
    if kind in HIGH_BITS:
        return PLANE_WIDTH
    return 64 if kind == "fp4" or group >= columns else min(64, group)


def can_tile(weight: PackedWeight) -> bool:
    """Whether `tile` and the kernels support the format of a matrix; shapes do not matter."""
    if weight.kind == "int8" and weight.zeros is not None:
        return False
    if weight.kind == "fp4":
        return weight.group in (16, 32) and weight.scales.element_size() == 1
    if weight.kind in HIGH_BITS:
        return weight.zeros is None and has_small_planes(weight.group)
    whole = weight.group >= weight.columns
    if whole and weight.offsets is not None:
        return False
    return whole or weight.group in (16, 32, 64) or weight.group % 128 == 0


def zeros_or_offsets(weight: TiledWeight) -> tuple[Tensor | None, int]:
    """What kernels read beside scales, and what it is: 0 = nothing, 1 = zeros, 2 = offsets."""
    if weight.offsets is not None:
        return weight.offsets, 2
    return weight.zeros, int(weight.zeros is not None)


def can_be_narrow(weight: PackedWeight) -> bool:
    """Whether `factors_of_blocks` can be made of a matrix. Reads its scales."""
    if weight.kind != "fp4" or weight.scales.dtype != torch.uint8 or weight.group != 32:
        return False
    if weight.shape[0] % 64 or weight.global_scale is not None:
        return False
    return weight.device.type == "meta" or int(weight.scales.max()) <= MOST_EXPONENT


def factors_of_blocks(scales: Tensor) -> Tensor:
    """The scales of "mxfp4" [N, groups] uint8 in the order in which `hopper_experts` reads them:
    [N / 64, ceil(groups / 8), 128] int32, of 64 rows and 256 columns each.

    Of 128 threads, each needs the scales of two groups of two rows, 8 apart: four bytes. A byte is
    the exponent of a factor in bfloat16: of its scale, times the 2 ** 126 of `FP4_TIMES`, divided
    by FACTOR_DIVISOR. Scales below 2 ** -103 become 2 ** -103.
    """
    rows, groups = scales.shape
    steps = -(-groups // 8)
    exponents = functional.pad(scales.clamp(24, MOST_EXPONENT) + 110, (0, steps * 8 - groups))
    by_thread = exponents.view(rows // 64, 4, 2, 8, steps, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)
    return by_thread.reshape(rows // 64, steps, 512).view(torch.int32)


def tile(weight: PackedWeight, narrow: bool = False) -> TiledWeight:
    """Convert a matrix; `can_tile` must be True. Needs memory for a few rows besides both.

    With `narrow`, which needs `can_be_narrow`, a span has 64 columns, so that K is padded to less,
    and there are `factors`.
    """
    assert can_tile(weight), weight.kind
    rows, columns = weight.shape
    width, slices = slice_width(weight.kind, weight.group, columns), slices_of(weight.kind)
    width = 16 if narrow else width
    spans = -(-columns // (width * slices))
    has_planes = weight.high is not None
    row, rest = words_of_row(weight.kind, columns) if has_planes else (spans * width, 0)
    words = torch.empty(rows, row, dtype=torch.int16, device=weight.device)
    high = words.new_empty(rows, rest) if has_planes else None
    step = max(_PIECE_VALUES // max(columns, 1), 1)
    for start in range(0, 0 if words.is_meta else rows, step):
        piece = slice(start, start + step)
        if weight.high is not None and high is not None:
            words[piece], high[piece] = plane_words(
                weight.values[piece], weight.high[piece], weight.kind, columns
            )
        else:
            words[piece] = _words(weight.values[piece], weight.kind, spans, width)
    zeros, offsets = weight.zeros, weight.offsets
    if _are_side_by_side(weight):
        scales = side_by_side(weight.scales)
        offsets = None if offsets is None else side_by_side(offsets)
    else:
        scales = weight.scales if weight.kind == "fp4" else weight.scales.T
        offsets = None if offsets is None else offsets.T
    super_scales, super_offsets = weight.super_scales, weight.super_offsets
    return TiledWeight(
        weight.kind,
        words,
        scales.contiguous(),
        columns,
        weight.group,
        weight.row_group,
        zeros=None if zeros is None else zeros.T.to(torch.uint8).contiguous(),
        offsets=None if offsets is None else offsets.contiguous(),
        global_scale=weight.global_scale,
        order=weight.order,
        activations=weight.activations,
        input_scale=weight.input_scale,
        super_scales=None if super_scales is None else super_scales.T.contiguous(),
        super_offsets=None if super_offsets is None else super_offsets.T.contiguous(),
        narrow=narrow,
        factors=factors_of_blocks(weight.scales) if narrow else None,
        high=high,
        by_rows=weight.scales.float().contiguous() if weight.activations == "fp8-block" else None,
    )


def _are_side_by_side(weight: PackedWeight) -> bool:
    """Whether neighbouring scales of a row lie together: a span of words has 4 bytes of them."""
    if weight.kind in HIGH_BITS:
        return True
    if weight.kind not in ("int4", "int8") or weight.zeros is not None or weight.row_group > 1:
        return False
    if weight.group != 32 or weight.group >= weight.columns:
        return False
    return slices_of(weight.kind) * weight.scales.element_size() % 4 == 0  # a slice is a group


def _words(values: Tensor, kind: Kind, spans: int, width: int) -> Tensor:
    """Stored values [n, ...] as words [n, spans * width] int16."""
    codes = values.view(torch.uint8)
    if kind in NIBBLES:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    slices = slices_of(kind)
    padded = functional.pad(codes, (0, spans * width * slices - codes.shape[1]))
    parts = padded.view(-1, spans, slices, width).int()
    words = _spread(parts, kind).sum(2, dtype=torch.int32)
    return words.to(torch.int16).flatten(1)  # keeps the low bits


def _spread(codes: Tensor, kind: Kind) -> Tensor:
    """Codes [n, spans, slices, width] at the bits of a word."""
    if kind != "fp4":
        return codes << _column(range(0, 16, 16 // slices_of(kind)), codes)
    return (codes & 7) << _column(FP4_FIELDS, codes) | (codes >> 3) << _column(FP4_SIGNS, codes)


def _column(bits: Iterable[int], like: Tensor) -> Tensor:
    """Numbers of bits, one for each slice."""
    return torch.tensor([*bits], device=like.device)[:, None]


def _values(words: Tensor, weight: TiledWeight) -> Tensor:
    """Words [n, W] as the stored values [n, ...] of a `PackedWeight`."""
    slices, width = weight.slices, weight.slice_width
    parts = words.view(words.shape[0], -1, 1, width).int()
    if weight.kind == "fp4":
        codes = parts >> _column(FP4_FIELDS, parts) & 7
        codes |= (parts >> _column(FP4_SIGNS, parts) & 1) << 3
    else:
        codes = parts >> _column(range(0, 16, 16 // slices), parts) & (15 if slices == 4 else 255)
    codes = codes.to(torch.uint8).flatten(1)
    if weight.kind in NIBBLES:
        codes = codes[:, : weight.columns + weight.columns % 2]
        return codes[:, ::2] | (codes[:, 1::2] << 4)
    dtype = torch.float8_e4m3fn if weight.kind == "fp8" else torch.int8
    return codes[:, : weight.columns].contiguous().view(dtype)
