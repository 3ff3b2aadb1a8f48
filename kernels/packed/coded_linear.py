"""Linear layers that multiply coded rows by codes; rows that are not coded yet are coded first."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.linear import Norm
from ..quant.tiled import TiledWeight
from .coded import Coding, code_rows, is_coded, norm_and_code
from .kinds import PLAIN, Codes


def coded_linear(
    x: Tensor,
    weight: TiledWeight,
    choice: Codes,
    dtype: torch.dtype | None = None,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    activation: str = "silu",
    coding: Coding | None = None,
) -> Tensor:
    """See `packed.linear`, whose operations are the modes.

    x: [M, K], or coded rows of `coding_of(weight, choice)`; then the output has `dtype`, and no
    norm is left. With `coding` the output is coded rows if the kernel can write them so.
    """
    if is_coded(x):
        assert dtype is not None and norm is None
    else:
        dtype, own = x.dtype, coding_of(weight, choice)
        x = code_rows(x, own) if norm is None else norm_and_code(x, None, *norm, own)[0]
    rest = x, weight, choice, dtype, mode, bias, activation, residual, coding
    out: Tensor
    if choice.roles:
        from .triton import hopper_codes

        out = hopper_codes.multiply(*rest)
    else:
        from .triton import coded_product

        out = coded_product.multiply(*rest)
    return out


def coding_of(weight: TiledWeight, choice: Codes) -> Coding:
    """How the kernel wants its input to be coded."""
    return Coding(weight.columns, choice.by_group > 0)
