"""Matrices of fp8 (e4m3) and of int8 numbers with scales per matrix, row, block or group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels.quant.packed import BLOCK, Kind, PackedWeight
from .parts import Parts

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def read_8bit(parts: Parts) -> PackedWeight:
    """`weight` of float8_e4m3fn or int8 with a `weight_scale` or `weight_scale_inv`.

    All of them are multiplied with the numbers.
    """
    weight = parts.take("weight", (torch.float8_e4m3fn, torch.int8), (None, None))
    kind: Kind = "fp8" if weight.dtype == torch.float8_e4m3fn else "int8"
    leaf = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    stored = parts.take(leaf, (*FLOATS, *E8M0) if kind == "fp8" else FLOATS)
    scales, group, row_group = _scales(parts, weight, leaf, stored)
    fields: dict[str, Any] = {"activations": parts.activations}
    if fields["activations"] == "fp8-static":
        if "input_scale" in parts:
            fields["input_scale"] = parts.take("input_scale", FLOATS).float().amax()
        else:
            fields["activations"] = "fp8-token"
    if kind == "int8" and "weight_zero_point" in parts:
        zeros = parts.take("weight_zero_point", (torch.int8,))
        if zeros.numel() == 1:
            zeros = zeros.reshape(1, 1).expand(scales.shape)
        elif zeros.shape != scales.shape:
            raise parts.wrong("has zero points of another shape than its scales")
        fields["zeros"] = zeros.contiguous()
    columns = weight.shape[1]
    return PackedWeight(kind, weight, scales, columns, group, row_group, **fields)


def _scales(parts: Parts, weight: Tensor, leaf: str, scales: Tensor) -> tuple[Tensor, int, int]:
    """(scales as `PackedWeight` wants them, columns of a group, rows of a group)."""
    rows, columns = weight.shape
    if scales.dtype in E8M0:
        scales = scales.view(torch.float8_e8m0fnu).float()
    if scales.numel() == 1 and leaf == "weight_scale":
        # One for each row, so that parts with different scales can be one matrix.
        return scales.float().reshape(1, 1).expand(rows, 1).contiguous(), columns, 1
    if scales.dim() == 4 and scales.shape[1] == scales.shape[3] == 1:
        scales = scales[:, 0, :, 0]
    if scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if scales.dim() == 2 and scales.shape == (rows, 1) and leaf == "weight_scale":
        return scales.contiguous(), columns, 1
    stated = None if parts.quantisation is None else parts.quantisation.block
    block = stated or (BLOCK, BLOCK)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.shape == grid:
        if block[0] == BLOCK:
            return scales.contiguous(), min(block[1], columns), BLOCK
        by_rows = scales.repeat_interleave(block[0], 0)[:rows].contiguous()
        return by_rows, min(block[1], columns), 1
    if scales.dim() == 2 and scales.shape[0] == rows:
        return scales.contiguous(), parts.group(columns, scales.shape[1]), 1
    raise parts.wrong(
        f"has shape {[rows, columns]} in blocks of {list(block)}, but its scales have shape "
        f"{list(scales.shape)}"
    )
