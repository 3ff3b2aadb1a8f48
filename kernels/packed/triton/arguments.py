"""Arguments of the kernels for quantised weights, by parameter name."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...linear.linear import Norm
from ...linear.triton.skinny import _TRITON_DTYPES
from ...quant.tiled import TiledWeight, zeros_or_offsets
from ...quant.triton.packed_codes import KINDS
from ...quant.triton.plane_codes import PLANE_KINDS
from ...quant.triton.plane_scales import STORED
from ..coding import Coding
from ..kinds import GATE_UP, PARTS, Codes, codes_output, has_groups
from .coded_rows import empty_rows


def scale_arguments(weight: TiledWeight, filler: Tensor) -> dict[str, Any]:
    """Arguments of a kernel: tensors and strides of scales and zeros, and what the kernel bakes.

    Scales of whole rows are in `channel`, where the kernel multiplies its sums by them once. The
    `filler` stands in for tensors that the format lacks.
    """
    if weight.scales.dim() == 3:
        return _small_arguments(weight, filler)
    is_fp4 = weight.kind == "fp4"
    whole = weight.group >= weight.columns and weight.row_group == 1
    columns = weight.slices * weight.slice_width
    # A matrix of fewer columns than a span has one group, even if more would fit into the span.
    groups = 1 if weight.group >= weight.columns else max(columns // weight.group, 1)
    zeros, mode = zeros_or_offsets(weight)
    factors = weight.scales if whole and not is_fp4 else weight.global_scale
    return {
        "scales": weight.scales.view(torch.uint8) if is_fp4 else weight.scales,
        "zeros": filler if zeros is None else zeros,
        "channel": filler if factors is None else factors,
        "num_groups": weight.scales.shape[1] if is_fp4 else weight.scales.shape[0],
        "stride": weight.scales.stride(0),
        "zero_stride": 0 if zeros is None else zeros.stride(0),
        "super_scales": filler if weight.super_scales is None else weight.super_scales,
        "super_offsets": filler if weight.super_offsets is None else weight.super_offsets,
        "KIND": KINDS[weight.kind],
        "GROUP": 1 << 30 if whole and not is_fp4 else weight.group,
        "ROW_GROUP": weight.row_group,
        "GROUPS": 0 if whole or is_fp4 else groups,
        "E8M0": weight.scales.dtype == torch.uint8,
        "ZEROS": mode,
        "CHANNEL": factors is not None,
        "STORED": -1,
    }


def _small_arguments(weight: TiledWeight, filler: Tensor) -> dict[str, Any]:
    """`scale_arguments` of small groups, whose neighbours are registers."""
    scales, offsets = weight.scales.view(torch.int32), weight.offsets
    return {
        "scales": scales,
        "zeros": filler if offsets is None else offsets.view(torch.int32),
        "channel": filler,
        "num_groups": scales.shape[0],
        "stride": scales.stride(0),
        "zero_stride": scales.stride(0),
        "super_scales": filler if weight.super_scales is None else weight.super_scales,
        "super_offsets": filler if weight.super_offsets is None else weight.super_offsets,
        "KIND": (KINDS | PLANE_KINDS)[weight.kind],
        "GROUP": weight.group,
        "ROW_GROUP": 1,
        "GROUPS": weight.slices * weight.slice_width // weight.group,
        "E8M0": False,
        "ZEROS": 0 if offsets is None else 2,
        "CHANNEL": False,
        "STORED": STORED[weight.scales.dtype],
    }


def product_arguments(
    x: Tensor,
    weight: TiledWeight,
    mode: int,
    bias: Tensor | None,
    activation: str,
    norm: Norm | None,
    residual: Tensor | None,
) -> dict[str, Any]:
    """Arguments of a linear layer's kernel: the operands besides x and the weight, sizes, and what
    the kernel computes. x [M, K]; `mode`: see `kinds`; in place of absent tensors stands x."""
    num_rows, num_inputs = x.shape
    return {
        "gain": x if norm is None else norm[0],
        "bias": x if bias is None else bias,
        "residual": x if residual is None else residual,
        "eps": 0.0 if norm is None else norm[1],
        "num_rows": num_rows,
        "num_outputs": weight.shape[0] // (2 if mode == GATE_UP else 1),
        "num_inputs": num_inputs,
        "num_words": weight.words.shape[1],
        "SLICES": weight.slices,
        "NORM": norm is not None,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "MODE": mode,
        "ACTIVATION": int(activation == "gelu_tanh"),
        "DTYPE": _TRITON_DTYPES[x.dtype],
        "ASSEMBLY": not x.is_cpu,
    }


def taken(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments for which a kernel has a parameter."""
    return {name: given[name] for name in kernel.arg_names if name in given}


def empty_output(x: Tensor, num_outputs: int, mode: int, split_k: int = 1) -> Tensor:
    """Memory for a product of x [M, K]: [M, num_outputs], or with PARTS [split_k, M, num_outputs]
    float32."""
    if mode == PARTS:
        return x.new_empty(split_k, x.shape[0], num_outputs, dtype=torch.float32)
    return x.new_empty(x.shape[0], num_outputs)


def parts_of(num_units: int, split_k: int, step: int) -> tuple[int, int]:
    """The number of parts of a split, `split_k` or fewer, and the units of a part, a multiple of
    those of a step. No part is empty: kernels load a part's first step before they know its end."""
    units = triton.cdiv(triton.cdiv(num_units, split_k), step) * step
    return triton.cdiv(num_units, units), units


def coded_arguments(
    x: Tensor,
    weight: TiledWeight,
    choice: Codes,
    dtype: torch.dtype,
    mode: int,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    coding: Coding | None,
) -> tuple[Tensor, dict[str, Any]]:
    """The empty output of a product of coded rows, and the arguments of its kernel except for
    tiles; see `coded_product.multiply`."""
    rows, columns = weight.shape
    source = Coding(columns, choice.by_group > 0)
    assert x.is_contiguous() and x.shape[1] == source.row_bytes
    grouped = has_groups(weight)
    assert choice.by_group or not grouped
    num_rows, num_outputs = x.shape[0], rows // (2 if mode == GATE_UP else 1)
    split_k = choice.split_k if mode == PARTS else 1
    out_scales, out_bytes = x, 0
    if coding is not None and codes_output(choice, mode, coding):
        assert coding.columns == num_outputs
        result, out, out_scales = empty_rows(x, num_rows, coding)
        out_bytes = coding.row_bytes
    elif mode == PARTS:
        of_parts = dtype if choice.narrow else torch.float32
        result = out = x.new_empty(split_k, num_rows, num_outputs, dtype=of_parts)
    else:
        result = out = x.new_empty(num_rows, num_outputs, dtype=dtype)
    return result, {
        "x_scales": x.view(torch.float32)[:, source.num_codes // 4 :],
        "scales": weight.scales,
        "bias": x if bias is None else bias,
        "residual": x if residual is None else residual,
        "out": out,
        "out_scales": out_scales,
        "num_rows": num_rows,
        "num_outputs": num_outputs,
        "stride": weight.scales.stride(0),
        "split_k": split_k,
        "out_bytes": out_bytes,
        "BLOCK_N": choice.block_n,
        "ROW_FLOATS": source.row_bytes // 4,
        "BY_GROUP": choice.by_group > 0,
        "ROW_GROUP": weight.row_group if grouped else 0,
        "PROMOTE": choice.promote > 0,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "MODE": mode,
        "ACTIVATION": int(activation == "gelu_tanh"),
        "CODED": out_bytes > 0,
        "DTYPE": _TRITON_DTYPES[dtype],
    }
