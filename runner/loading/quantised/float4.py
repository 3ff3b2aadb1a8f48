"""Numbers of 4 bits (e2m1): NVFP4 in groups of 16 with two scales, and MXFP4 in groups of 32."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.quant.packed import PackedWeight
from .float8 import E8M0, FLOATS
from .parts import Parts


def is_float4(parts: Parts) -> bool:
    """Whether a `weight` of int8 holds numbers of 4 bits, as in DeepSeek V4: scales are e8m0."""
    scales, weight = parts.tensors.get("weight_scale_inv"), parts.tensors.get("weight")
    if scales is None or weight is None or weight.dtype != torch.int8:
        return False
    return scales.dtype == torch.float8_e8m0fnu


def read_float4(parts: Parts) -> PackedWeight:
    """`weight_packed` (compressed-tensors) or `weight` (ModelOpt, DeepSeek V4) uint8 [N, K / 2].

    `weight_scale` is e4m3 [N, K / 16] with a scale of the matrix, or e8m0 [N, K / 32] alone. The
    scale of the matrix divides in compressed-tensors (`weight_global_scale`), and multiplies in
    ModelOpt (`weight_scale_2`).
    """
    leaf = "weight_packed" if "weight_packed" in parts else "weight"
    stored = parts.take(leaf, (torch.uint8, torch.int8), (None, None)).view(torch.uint8)
    rows, columns = stored.shape[0], stored.shape[1] * 2
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scales = parts.take(name, (torch.float8_e4m3fn, *E8M0), (rows, None))
    group = 16 if scales.dtype == torch.float8_e4m3fn else 32
    if scales.shape[1] != -(-columns // group):
        raise parts.wrong(
            f"has {columns} columns in groups of {group}, but {scales.shape[1]} scales a row"
        )
    whole: Tensor | None = None
    if group == 16:
        if "weight_scale_2" in parts:
            whole = parts.take("weight_scale_2", FLOATS).float()
        else:
            whole = 1.0 / parts.take("weight_global_scale", FLOATS).float()
        if whole.numel() != 1:
            raise parts.wrong(f"has {whole.numel()} scales for the whole matrix, but must have one")
        whole = whole.reshape(1).expand(rows).contiguous()
    else:
        scales = scales.view(torch.uint8)
    return PackedWeight("fp4", stored, scales, columns, group, global_scale=whole)
