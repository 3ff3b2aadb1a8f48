"""Linear layers with a quantised weight: the operations of `linear` and `head_sample` for it.

`choice` names the kernel, see `choice`; without one the weight is dequantised to the dtype
of `x`, and torch multiplies. The kernels need a weight that `quant.tiled.prepare` has converted.
Up to 64 rows they round no weight; `choice` says when activations are quantised. x may have coded
rows (see `coded`) if the choice is `Codes`; then `dtype` is that of the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import use_triton
from ..linear.activation import GATED
from ..linear.head_sample import Draws, pick_rows
from ..linear.linear import Norm, linear_reference
from ..linear.linear_choice import Gemv, Skinny
from ..linear.norm_rope import rms_norm
from ..quant.tiled import TiledWeight, Weight
from .choice import choose_packed as choose_packed
from .coded import Coding, code_rows, gate_and_code, is_coded, norm_and_code, planes
from .coded_linear import coded_linear
from .kinds import (
    GATE_UP,
    PARTS,
    PLAIN,
    Codes,
    Direct,
    PackedChoice,
    Quantised,
    Row,
    fits_small_groups,
    has_groups,
)


def packed_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    choice: PackedChoice = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute residual + rms_norm(x) Wᵀ + b, leaving out what is None.

    x: [..., K], with a `choice` [M, K]; weight: [N, K]; bias: [N]; residual: [..., N]. Returns
    [..., N] in the dtype of `x`.
    """
    if choice is None or not isinstance(weight, TiledWeight) or not _has_kernels(x):
        return _wide_linear(x, weight, bias, norm, residual)
    if isinstance(choice, Quantised):
        return _quantised_linear(x, weight, bias, norm, residual, dtype)
    if isinstance(choice, Codes):
        return coded_linear(x, weight, choice, dtype, PLAIN, bias, norm, residual)
    x, norm = _prepared(x, weight, norm, choice)
    return _multiply(x, weight, choice, PLAIN, bias, norm=norm, residual=residual)


def _wide_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, norm: Norm | None, residual: Tensor | None
) -> Tensor:
    """The product with a copy of the weight in the dtype of x, by torch."""
    if not isinstance(weight, TiledWeight) or not use_triton(x):
        return linear_reference(x, weight.dequantise(x.dtype), bias, norm, residual)
    from ..quant.triton.widen import widen

    x = _normed(x, norm)
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    return linear_reference(x, widen(weight, x.dtype), bias, None, residual)


def _quantised_linear(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None,
    norm: Norm | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """The product with activations quantised row by row, which torch computes from codes."""
    if weight.kind == "int8":
        from .triton.packed_tokens import quantise_rows, rescale

        codes = weight.words.view(torch.int8)  # [N, columns padded to whole spans]
        x_codes, x_scales = quantise_rows(_normed(x, norm), codes.shape[1])
        sums = torch._int_mm(x_codes, codes.T)
        return rescale(sums, x_scales, weight.scales[0], bias, residual, x.dtype)
    in_blocks = has_groups(weight)
    planar = Coding(weight.columns, in_blocks, planar=True)
    if not is_coded(x):
        out_dtype = x.dtype
        x = code_rows(x, planar) if norm is None else norm_and_code(x, None, *norm, planar)[0]
        norm = None
    assert out_dtype is not None and norm is None
    x_codes, x_scales = planes(x, planar)
    out = torch._scaled_mm(
        x_codes,
        weight.words.view(torch.float8_e4m3fn).T,
        scale_a=x_scales,
        scale_b=_of_blocks(weight).T if in_blocks else weight.scales.float(),
        out_dtype=torch.bfloat16,  # the only one that it knows with a scale for each row
        use_fast_accum=not in_blocks,
    )
    out = out[: x.shape[0]].to(out_dtype)
    out = out if bias is None else out.add_(bias)
    return out if residual is None else out.add_(residual)


def _of_blocks(weight: TiledWeight) -> Tensor:
    """Scales of blocks [N / 128, K / 128]; a part of a matrix has them by columns alone."""
    return weight.scales.float().T.contiguous() if weight.by_rows is None else weight.by_rows


def packed_linear_parts(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    choice: PackedChoice = None,
    norm: Norm | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute rms_norm(x) Wᵀ + b for a next kernel that can sum parts.

    Returns [M, N], or float32 parts [S, M, N] whose sum is the result.
    """
    if isinstance(choice, Codes) and isinstance(weight, TiledWeight) and _has_kernels(x):
        mode = PARTS if choice.split_k > 1 else PLAIN
        return coded_linear(x, weight, choice, dtype, mode, bias, norm)
    if not isinstance(choice, Skinny | Row | Direct) or not isinstance(weight, TiledWeight):
        return packed_linear(x, weight, bias, choice, norm, dtype=dtype)
    if not _has_kernels(x) or (norm is not None and choice.norm):
        return packed_linear(x, weight, bias, choice, norm, dtype=dtype)
    x, _ = _prepared(x, weight, norm, choice)
    return _multiply(x, weight, choice, PARTS, bias)


def packed_gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activation: str = "silu",
    choice: PackedChoice = None,
    norm: Norm | None = None,
    dtype: torch.dtype | None = None,
    coding: Coding | None = None,
) -> Tensor:
    """Compute act(gate) * up for a fused gate and up projection.

    x: [M, K]; weight: [2 I, K], gate rows first; bias: [2 I]; activation: "silu" or "gelu_tanh".
    Returns [M, I]; as coded rows if the kernel can write what `coding` says.
    """
    if choice is None or not isinstance(weight, TiledWeight) or not _has_kernels(x):
        return GATED[activation](_wide_linear(x, weight, bias, norm, None))
    if isinstance(choice, Quantised):
        both = _quantised_linear(x, weight, bias, norm, None, dtype)
        if coding is not None:
            return gate_and_code(both, activation, coding)
        return GATED[activation](both)
    if isinstance(choice, Codes):
        return coded_linear(x, weight, choice, dtype, GATE_UP, bias, norm, None, activation, coding)
    x, norm = _prepared(x, weight, norm, choice)
    return _multiply(x, weight, choice, GATE_UP, bias, activation, norm)


def packed_sample_head(
    x: Tensor, weight: Weight, draws: Draws | None = None, choice: PackedChoice = None
) -> tuple[Tensor, Tensor]:
    """Pick a token for each row of the head's input; see `head_sample.sample_head`.

    x: [L, H]; weight: [V, H]. Returns the tokens [L] int64 and the largest logits [L] float32.
    """
    return pick_rows(packed_linear(x, weight, None, choice), draws)


def _multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Gemv | Skinny | Row | Direct,
    mode: int,
    bias: Tensor | None,
    activation: str = "silu",
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The product by the chosen kernel."""
    out: Tensor
    if isinstance(choice, Gemv):
        from .triton import packed_gemv

        out = packed_gemv.multiply(x, weight, choice, mode, bias, activation, norm, residual)
    elif isinstance(choice, Direct) and x.shape[0] > 1:
        from .planes.triton import few_rows

        assert norm is None
        out = few_rows.multiply(x, weight, choice, mode, bias, activation, residual)
    elif isinstance(choice, Direct) and fits_small_groups(weight):
        from .planes.triton import direct_groups

        out = direct_groups.multiply(x, weight, choice, mode, bias, activation, norm, residual)
    elif isinstance(choice, Direct):
        from .triton import packed_direct

        out = packed_direct.multiply(x, weight, choice, mode, bias, activation, norm, residual)
    elif isinstance(choice, Row):
        from .triton import packed_row

        out = packed_row.multiply(x, weight, choice, mode, bias, activation, norm, residual)
    else:
        from .triton import packed_skinny

        out = packed_skinny.multiply(x, weight, choice, mode, bias, activation, norm, residual)
    return out


def _in_order(x: Tensor, weight: TiledWeight) -> Tensor:
    """x [M, K] with its columns in the order of the stored columns."""
    return x if weight.order is None else x.index_select(1, weight.order)


def _has_kernels(x: Tensor) -> bool:
    """Whether the kernels take x, which may be coded: numbers are exact in 16 bits, but products
    with float32 are left to torch."""
    return (x.dtype in (torch.bfloat16, torch.float16) or is_coded(x)) and use_triton(x)


def _prepared(
    x: Tensor, weight: TiledWeight, norm: Norm | None, choice: Gemv | Skinny | Row | Direct
) -> tuple[Tensor, Norm | None]:
    """The kernel's input, and the norm if the kernel applies it: not if columns are reordered."""
    if choice.norm and weight.order is None:
        return x, norm
    return _in_order(_normed(x, norm), weight), None


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, *norm)
