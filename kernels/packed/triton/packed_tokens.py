"""Quantises activations row by row, for products of codes with codes."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs


@triton.jit
def _quantise_kernel(
    x,  # [M, K]
    codes,  # [M, KP] int8, columns in the order of the bytes of packed words
    scales,  # [M] float32
    K,
    KP,
    BLOCK: tl.constexpr,  # bytes in a step: a multiple of 128
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.maximum(tl.max(largest), 1e-12) / 127.0
    tl.store(scales + row, scale)
    for start in range(0, KP, BLOCK):
        byte = start + tl.arange(0, BLOCK)
        # byte 2 j + i of a span of 128 is column 64 i + j
        at = byte // 128 * 128 + byte % 2 * 64 + byte % 128 // 2
        value = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32) / scale
        code = tl.floor(value + 0.5).to(codes.dtype.element_ty)
        tl.store(codes + row * KP + byte, code, mask=byte < KP)


@triton.jit
def _rescale_kernel(
    sums,  # [M, N] int32
    row_scales,  # [M] float32
    scales,  # [N]
    bias,  # [N]
    residual,  # [M, N]
    out,  # [M, N]
    N,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    wait_for_inputs(PDL)
    y = tl.load(sums + row * N + n, mask=inside, other=0).to(tl.float32)
    y *= tl.load(row_scales + row) * tl.load(scales + n, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + row * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, y.to(out.dtype.element_ty), mask=inside)


def quantise_rows(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Rows of x [M, K] as int8 codes [M, columns] and scales [M, 1] float32.

    Columns have the order of the bytes of packed words, and are padded with zeros. The scale maps
    a row's largest magnitude to 127.
    """
    rows = x.shape[0]
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _quantise_kernel[(rows,)](
        x, codes, scales, x.shape[1], columns, BLOCK=1024, num_warps=4, **pdl_options(x)
    )
    return codes, scales


def rescale(
    sums: Tensor,
    row_scales: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """sums [M, N] int32 times row_scales [M, 1] and scales [N], plus bias and residual: [M, N]."""
    rows, outputs = sums.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=sums.device)
    _rescale_kernel[(rows, triton.cdiv(outputs, 1024))](
        sums,
        row_scales,
        scales,
        scales if bias is None else bias,
        sums if residual is None else residual,
        out,
        outputs,
        BLOCK=1024,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=4,
        **pdl_options(sums),
    )
    return out


hash_functions(globals())
