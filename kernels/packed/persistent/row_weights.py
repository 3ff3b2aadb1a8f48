"""The weights between two attentions, and whether the kernel for one row knows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...device import card_of
from ...linear.linear import Norm
from ...quant.tiled import TiledWeight
from ..kinds import fits_direct, has_groups


@dataclass(frozen=True)
class RowLayer:
    """The weights between an attention and the next one, which is that of the next layer."""

    o: TiledWeight  # [H, heads * head_dim]
    gate_up: TiledWeight  # [2 I, H]
    down: TiledWeight  # [H, I]
    qkv: TiledWeight | None  # [N, H] of the next layer; None after the last one
    norm: Norm  # before gate and up
    next_norm: Norm | None  # before `qkv`


def fits_row_layer(layer: RowLayer, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel knows these weights: fp8 with scales of rows, or int4 in groups of 128,
    on a Hopper GPU."""
    card = card_of(device)
    if dtype != torch.bfloat16 or (card is not None and card.capability[0] != 9):
        return False
    weights = [layer.o, layer.gate_up, layer.down, *([] if layer.qkv is None else [layer.qkv])]
    hidden, inner = layer.o.shape[0], layer.down.shape[1]
    chained = (
        layer.gate_up.shape == (2 * inner, hidden)
        and layer.down.shape[0] == hidden
        and (layer.qkv is None or (layer.qkv.shape[1] == hidden and layer.next_norm is not None))
    )
    alike = {(own.kind, own.scales.dtype, own.zeros is None) for own in weights}
    return chained and len(alike) == 1 and inner % 8 == 0 and all(map(_fits, weights))


def _fits(weight: TiledWeight) -> bool:
    if weight.order is not None or weight.shape[0] % 16:
        return False
    if not fits_direct(weight) or weight.words.numel() >= 2**31:
        return False
    if weight.kind == "int4":
        return weight.group == 128 and weight.scales.element_size() == 2
    return weight.kind == "fp8" and not has_groups(weight)
