"""The weights between two attentions, and whether the kernel for few rows knows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...device import card_of
from ...linear.linear import Norm
from ...quant.tiled import TiledWeight
from ..kinds import fits_direct, has_groups

_LEAST_BYTES = 64 << 20  # of a layer; with fewer, programs wait for each other most of the time
_MOST_COLUMNS = 1 << 15  # shared memory holds a whole input beside the words


@dataclass(frozen=True)
class RowLayer:
    """The weights between an attention and the next one, which is that of the next layer."""

    o: TiledWeight  # [H, heads * head_dim]
    gate_up: TiledWeight  # [2 I, H]
    down: TiledWeight  # [H, I]
    qkv: TiledWeight | None  # [N, H] of the next layer; None after the last one
    norm: Norm  # before gate and up
    next_norm: Norm | None  # before `qkv`

    @property
    def matrices(self) -> list[TiledWeight]:
        """All of its matrices."""
        return [self.o, self.gate_up, self.down, *([] if self.qkv is None else [self.qkv])]

    @property
    def is_large(self) -> bool:
        """Whether one launch is faster than one for each product."""
        return sum(matrix.nbytes for matrix in self.matrices) >= _LEAST_BYTES


def fits_row_layer(layer: RowLayer, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel knows these weights on a Hopper GPU: fp8 with scales of rows, or int4 in
    groups of 128 with the zero 8; at most 32768 columns; and activations in bfloat16."""
    card = card_of(device)
    if dtype != torch.bfloat16 or (card is not None and card.capability[0] != 9):
        return False
    hidden, inner = layer.o.shape[0], layer.down.shape[1]
    chained = (
        layer.gate_up.shape == (2 * inner, hidden)
        and layer.down.shape[0] == hidden
        and (layer.qkv is None or (layer.qkv.shape[1] == hidden and layer.next_norm is not None))
    )
    alike = {(own.kind, own.scales.dtype) for own in layer.matrices}
    return chained and len(alike) == 1 and inner % 8 == 0 and all(map(_fits, layer.matrices))


def _fits(weight: TiledWeight) -> bool:
    if weight.order is not None or weight.zeros is not None or weight.shape[0] % 16:
        return False
    if weight.shape[1] > _MOST_COLUMNS:
        return False
    if not fits_direct(weight) or weight.words.numel() >= 2**31:
        return False
    if weight.kind == "int4":
        return weight.group == 128 and weight.scales.element_size() == 2
    return weight.kind == "fp8" and not has_groups(weight)
