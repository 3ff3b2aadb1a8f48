"""Rows of activations as 8-bit codes with scales, for products of codes with codes.

A coded row is a line of bytes: its e4m3 codes, in the order of the bytes of packed words and padded
with zeros to whole spans of 128, then float32 scales. It has one scale, or one for each 128
columns. A scale maps the largest magnitude of its columns to 448. So a row's codes depend on that
row alone. For products by torch, the codes of all rows come first (`Coding.planar`).

The functions here run the Triton kernels; the plain versions are for tests and devices without
them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..linear.activation import GATED
from ..linear.norm_rope import fused_add_rms_norm_reference, rms_norm_reference
from ..operation import operation
from ..quant.e4m3 import E4M3, LARGEST, scale_of
from .coding import SPAN
from .coding import Coding as Coding

LEAST = 1e-12  # the least magnitude that a scale is made of, so that rows of zeros have one


def is_coded(x: Tensor) -> bool:
    """Whether x has coded rows instead of numbers."""
    return x.dtype == torch.uint8


def code_rows_reference(x: Tensor, coding: Coding) -> Tensor:
    """The coded rows [M, row bytes] uint8 of x [M, K], which is contiguous."""
    rows = x.shape[0]
    padded = functional.pad(x.float(), (0, coding.num_codes - coding.columns))
    spans = padded.view(rows, coding.spans, 2, SPAN // 2)
    over = spans if coding.by_group else spans.flatten(1)[:, None, None]
    largest = over.abs().amax((2, 3)).clamp(min=LEAST)  # [M, spans or 1]
    scales = scale_of(largest)
    codes = (spans * (1 / scales)[:, :, None, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    ordered = codes.view(torch.uint8).transpose(2, 3).reshape(rows, coding.num_codes)
    if coding.planar:
        more = coding.in_planes(rows) - rows
        columns = functional.pad(scales.T, (0, more)).contiguous().view(torch.uint8)
        flat = torch.cat((functional.pad(ordered, (0, 0, 0, more)).flatten(), columns.flatten()))
        size = rows * coding.width(rows)
        return functional.pad(flat, (0, size - flat.numel())).view(rows, -1)
    tail = torch.zeros(rows, (coding.row_bytes - coding.num_codes) // 4, device=x.device)
    tail[:, : scales.shape[1]] = scales
    return torch.cat((ordered, tail.view(torch.uint8)), 1)


code_rows = operation(code_rows_reference, "x", ".triton.coded_rows")


def gate_and_code_reference(x: Tensor, activation: str, coding: Coding) -> Tensor:
    """Compute act(gate) * up of x [M, 2 K], gate first, as coded rows [M, row bytes] uint8.

    activation: "silu" or "gelu_tanh".
    """
    return code_rows_reference(GATED[activation](x), coding)


gate_and_code = operation(gate_and_code_reference, "x", ".triton.coded_rows")


def norm_and_code_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, coding: Coding
) -> tuple[Tensor, Tensor]:
    """Compute rms_norm(x + residual), coded, and x + residual [M, H].

    x: [M, H], or with a residual also float32 parts [S, M, H] to sum; residual: [M, H], None = 0;
    weight: [H]. Returns coded rows [M, row bytes] uint8, and the sum in the dtype of `residual`.
    """
    if residual is None:
        return code_rows_reference(rms_norm_reference(x, weight, eps), coding), x
    normed, stream = fused_add_rms_norm_reference(x, residual, weight, eps)
    return code_rows_reference(normed, coding), stream


norm_and_code = operation(norm_and_code_reference, "x", ".triton.coded_rows")


def decode_rows(coded: Tensor, coding: Coding) -> Tensor:
    """The numbers [M, K] float32 that coded rows [M, row bytes] stand for."""
    rows, count = coded.shape[0], coding.num_codes
    if coding.planar:
        plain, scales = (plane[:rows] for plane in planes(coded, coding))
    else:
        plain = coded[:, :count].view(E4M3)
        tail = coded[:, count:].contiguous().view(torch.float32)
        scales = tail[:, : coding.spans if coding.by_group else 1]
    codes = plain.float().reshape(rows, coding.spans, SPAN // 2, 2).transpose(2, 3)
    numbers = codes * scales[:, :, None, None]
    return numbers.reshape(rows, count)[:, : coding.columns]


def planes(coded: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """The codes [R, bytes of codes] e4m3 of planar coded rows, and their scales float32: [R, 1], or
    [R, spans] whose columns are contiguous. R is `coding.in_planes(M)`: more rows may follow."""
    assert coding.planar
    rows = coding.in_planes(coded.shape[0])
    codes, scales, _ = coded.view(-1).tensor_split(
        (rows * coding.num_codes, rows * coding.row_bytes)
    )
    return codes.view(E4M3).view(rows, -1), scales.view(torch.float32).view(-1, rows).T
