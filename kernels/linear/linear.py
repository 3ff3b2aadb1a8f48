"""Linear layers, fused with a norm, bias, residual or gated activation.

`choice` names the kernel (see `linear_choice`); torch computes the layer if it is None or Triton
cannot be used. Kernels accumulate in float32 and round once, while the references round after each
of their steps.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..device import use_triton
from .activation import GATED
from .linear_choice import GATE_UP, PARTS, PLAIN, Choice, Fixed, Gemv, Skinny, Wide
from .norm_rope import rms_norm
from .wide.products import multiply

Norm = tuple[Tensor, float]  # weight [K], eps


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    choice: Choice = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute residual + rms_norm(x) Wᵀ + b, leaving out what is None.

    x: [M, K]; weight: [N, K]; bias: [N]; residual: [M, N]. Returns [M, N] in the dtype of `x`.
    """
    if choice is None or not use_triton(x) or (isinstance(choice, Wide) and bias is not None):
        return linear_reference(x, weight, bias, norm, residual)
    if isinstance(choice, Wide):
        out = multiply(_normed(x, norm), weight, choice)
        return out if residual is None else out + residual
    return _of_few_rows(x, weight, choice, PLAIN, bias, norm=norm, residual=residual)


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The plain version of `linear`."""
    out = F.linear(_normed(x, norm), weight, bias)
    return out if residual is None else out + residual


def linear_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    choice: Choice = None,
    norm: Norm | None = None,
) -> Tensor:
    """Compute rms_norm(x) Wᵀ + b for a next kernel that can sum parts.

    Returns [M, N], or float32 parts [S, M, N] whose sum is the result.
    """
    if choice is None or isinstance(choice, Gemv | Fixed | Wide) or not use_triton(x):
        return linear(x, weight, bias, choice, norm)
    if norm is not None and choice.norm:
        return linear(x, weight, bias, choice, norm)
    return _of_few_rows(x, weight, choice, PARTS, bias, norm=norm)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    choice: Choice = None,
    norm: Norm | None = None,
) -> Tensor:
    """Compute act(gate) * up for a fused gate and up projection.

    x: [M, K]; weight: [2 I, K], gate rows first; bias: [2 I]; activation: "silu" or "gelu_tanh".
    Returns [M, I].
    """
    if choice is None or not use_triton(x) or (isinstance(choice, Wide) and bias is not None):
        return gated_linear_reference(x, weight, bias, activation, norm)
    if isinstance(choice, Wide):
        return multiply(_normed(x, norm), weight, choice, activation)
    return _of_few_rows(x, weight, choice, GATE_UP, bias, activation, norm)


def gated_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
) -> Tensor:
    """The plain version of `gated_linear`."""
    return GATED[activation](F.linear(_normed(x, norm), weight, bias))


def _of_few_rows(
    x: Tensor,
    weight: Tensor,
    choice: Gemv | Skinny,
    mode: int,
    bias: Tensor | None,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The product by a kernel of few rows, after the norm if that kernel does not apply it."""
    from .triton import gemv, skinny

    if not choice.norm:
        x, norm = _normed(x, norm), None
    out: Tensor
    if isinstance(choice, Gemv):
        out = gemv.multiply(x, weight, choice, mode, bias, activation, norm, residual)
        return out
    out = skinny.multiply(x, weight, choice, mode, bias, activation, norm)
    return out if residual is None else out + residual


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, *norm)
