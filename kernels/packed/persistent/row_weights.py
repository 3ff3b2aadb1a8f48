"""The weights between two attentions, and whether the kernel for one row knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ...device import card_of
from ...linear.linear import Norm
from ...quant.tiled import TiledWeight
from ..kinds import WIDTH, fits_direct, has_groups

Matrix: TypeAlias = TiledWeight | Tensor  # [N, K], quantised or in bfloat16
_LEAST_BYTES = 64 << 20  # of a layer; with fewer, programs wait for each other most of the time


@dataclass(frozen=True)
class RowLayer:
    """The weights between an attention and the next one, which is that of the next layer."""

    o: Matrix  # [H, heads * head_dim]
    gate_up: Matrix  # [2 I, H]
    down: Matrix  # [H, I]
    qkv: Matrix | None  # [N, H] of the next layer; None after the last one
    norm: Norm  # before gate and up
    next_norm: Norm | None  # before `qkv`

    @property
    def matrices(self) -> list[Matrix]:
        """All of its matrices."""
        return [self.o, self.gate_up, self.down, *([] if self.qkv is None else [self.qkv])]

    @property
    def kind(self) -> str:
        """The kind of the first matrix; "bf16" if it is not quantised."""
        return self.o.kind if isinstance(self.o, TiledWeight) else "bf16"

    @property
    def is_large(self) -> bool:
        """Whether one launch was measured to be faster than one for each product."""
        return sum(matrix.nbytes for matrix in self.matrices) >= _LEAST_BYTES


def fits_row_layer(layer: RowLayer, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel knows these weights on a Hopper GPU: bfloat16, fp8 with scales of rows, or
    int4 in groups of 128 with the zero 8."""
    card = card_of(device)
    if dtype != torch.bfloat16 or (card is not None and card.capability[0] != 9):
        return False
    hidden, inner = layer.o.shape[0], layer.down.shape[1]
    chained = (
        layer.gate_up.shape == (2 * inner, hidden)
        and layer.down.shape[0] == hidden
        and (layer.qkv is None or (layer.qkv.shape[1] == hidden and layer.next_norm is not None))
    )
    alike = set(map(_form, layer.matrices))
    return chained and len(alike) == 1 and inner % 8 == 0 and all(map(_fits, layer.matrices))


def _form(matrix: Matrix) -> object:
    if isinstance(matrix, Tensor):
        return matrix.dtype
    return matrix.kind, matrix.scales.dtype


def _fits(matrix: Matrix) -> bool:
    if matrix.shape[0] % 16:
        return False
    if isinstance(matrix, Tensor):
        plain = matrix.dtype == torch.bfloat16 and matrix.is_contiguous()
        return plain and matrix.shape[1] % WIDTH == 0 and matrix.numel() < 2**31
    if matrix.order is not None or matrix.zeros is not None:
        return False
    if not fits_direct(matrix) or matrix.words.numel() >= 2**31:
        return False
    if matrix.kind == "int4":
        return matrix.group == 128 and matrix.scales.element_size() == 2
    return matrix.kind == "fp8" and not has_groups(matrix)
