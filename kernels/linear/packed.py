"""Linear layers with a quantised weight: the operations of `linear` and `head_sample` for it.

`choice` names the kernel, see `choose_packed`; without one the weight is dequantised to the dtype
of `x`, and torch multiplies. The activations are not quantised, whatever the checkpoint asks for,
unless the chosen kernel does so.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..quant.packed import PackedWeight
from .head_sample import Draws, pick_rows, pick_rows_reference
from .linear import GATED, Norm
from .linear_choice import Choice
from .norm_rope import rms_norm


def choose_packed(weight: PackedWeight, role: str, num_rows: int) -> Choice:
    """The kernel for `num_rows` padded rows of a layer of this role; None = dequantise, then torch.

    It depends on shapes and formats, never on data, so a CUDA graph may bake it.
    """
    return None


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    choice: Choice = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute residual + rms_norm(x) Wᵀ + b, leaving out what is None.

    x: [..., K], with a `choice` [M, K]; weight: [N, K]; bias: [N]; residual: [..., N]. Returns
    [..., N] in the dtype of `x`.
    """
    return packed_linear_reference(x, weight, bias, norm, residual)


def packed_linear_reference(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The plain version of `packed_linear`."""
    out = F.linear(_normed(x, norm), weight.dequantise(x.dtype), bias)
    return out if residual is None else out + residual


def packed_linear_parts(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    choice: Choice = None,
    norm: Norm | None = None,
) -> Tensor:
    """Compute rms_norm(x) Wᵀ + b for a next kernel that can sum parts.

    Returns [M, N], or float32 parts [S, M, N] whose sum is the result.
    """
    return packed_linear(x, weight, bias, choice, norm)


def packed_gated_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: str = "silu",
    choice: Choice = None,
    norm: Norm | None = None,
) -> Tensor:
    """Compute act(gate) * up for a fused gate and up projection.

    x: [M, K]; weight: [2 I, K], gate rows first; bias: [2 I]; activation: "silu" or "gelu_tanh".
    Returns [M, I].
    """
    return GATED[activation](packed_linear(x, weight, bias, choice, norm))


def packed_gated_linear_reference(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
) -> Tensor:
    """The plain version of `packed_gated_linear`."""
    return GATED[activation](packed_linear_reference(x, weight, bias, norm))


def packed_sample_head(
    x: Tensor, weight: PackedWeight, draws: Draws | None = None, choice: Choice = None
) -> tuple[Tensor, Tensor]:
    """Pick a token for each row of the head's input; see `head_sample.sample_head`.

    x: [L, H]; weight: [V, H]. Returns the tokens [L] int64 and the largest logits [L] float32.
    """
    return pick_rows(packed_linear(x, weight, None, choice), draws)


def packed_sample_head_reference(
    x: Tensor, weight: PackedWeight, draws: Draws | None = None
) -> tuple[Tensor, Tensor]:
    """The plain version of `packed_sample_head`."""
    return pick_rows_reference(packed_linear_reference(x, weight), draws)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, *norm)
