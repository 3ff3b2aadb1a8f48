"""Chooses the reader of a quantised matrix by the tensors that are stored."""

from __future__ import annotations

import torch

from ....kernels.quant.packed import PackedWeight
from .awq_gptq import read_awq, read_gptq
from .float4 import is_float4, read_float4
from .float8 import read_8bit
from .packed_integers import read_packed_integers
from .parts import Parts


def read_matrix(parts: Parts) -> PackedWeight:
    """The matrix that these tensors describe, on their device.

    Raises ModelLoadError, with the tensor's name, if one is missing or cannot be true.
    """
    if "qweight" in parts:
        method = None if parts.quantisation is None else parts.quantisation.method
        if method == "awq":
            return read_awq(parts)
        if method == "gptq":
            return read_gptq(parts)
        raise parts.wrong("is stored as qweight, but the config's quant_method is not awq or gptq")
    leaf = "weight_packed" if "weight_packed" in parts else "weight"
    dtype = parts.tensors[leaf].dtype
    if leaf == "weight_packed" and dtype == torch.int32:
        return read_packed_integers(parts)
    if dtype == torch.uint8 or is_float4(parts):
        return read_float4(parts)
    if leaf == "weight" and dtype in (torch.float8_e4m3fn, torch.int8):
        return read_8bit(parts)
    raise parts.wrong(
        f"is stored as {leaf} of {str(dtype).removeprefix('torch.')} with scales; supported: "
        "float8_e4m3fn, int8, uint8 (4-bit floats) and int32 (packed integers)"
    )
