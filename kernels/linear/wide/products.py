"""Matrix products of many rows, and of them those with a gated activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...device import card_of, use_triton
from ...operation import operation
from ..activation import GATED
from ..linear_choice import Wide


def multiply_reference(
    x: Tensor, weight: Tensor, choice: Wide, activation: str | None = None
) -> Tensor:
    """Compute x Wᵀ [M, N]; or act(gate) * up [M, N / 2] where the first half of W are gates.

    x: [M, K]; weight: [N, K]; activation: None, "silu" or "gelu_tanh". `choice` names the
    tiles of the kernel for Hopper GPUs; the reference needs none.
    """
    out = F.linear(x, weight)
    return out if activation is None else GATED[activation](out)


def _fits(x: Tensor, weight: Tensor, choice: Wide, activation: str | None = None) -> bool:
    """Whether the kernel for Hopper GPUs can run, for a layer that `linear_choice.fits`."""
    card = card_of(x.device)
    if card is None or card.capability[0] != 9 or not use_triton(x):
        return False
    from ...launch import fits_tma  # it imports Triton

    return x.element_size() == 2 and x.dtype == weight.dtype and fits_tma(x, weight)


multiply = operation(multiply_reference, "x", ".triton.hopper_product", _fits)
