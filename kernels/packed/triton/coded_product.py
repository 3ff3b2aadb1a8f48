"""Triton linear layer for 2 to 256 coded rows: codes of 8 bits times codes on the tensor cores.

The tensor cores take e4m3 from shared memory, so no weight passes through registers. A tile of 64
or 128 weight rows is the left operand, and the coded rows are the right one, whose smallest size is
8: few rows waste little. Weights and rows have the same order of bytes, see `packed.coded`.

The tensor cores of Hopper keep about 14 bits of a sum of e4m3 products. So with PROMOTE the
products of each step are a sum of their own, which is added in float32. Scales of groups multiply
that sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import (
    fetch_early,
    fits_tma,
    has_tma,
    hash_functions,
    pdl_options,
    wait_for_inputs,
)
from ...linear.triton.gemv import gated
from ...linear.triton.skinny import _tile
from ...quant.tiled import TiledWeight
from ..coding import SPAN, Coding
from ..kinds import PLAIN, Codes
from .arguments import coded_arguments
from .coded_rows import codes_of


@triton.jit
def _of_weights(
    scales,  # [K / 128, rows / ROW_GROUP]
    group,
    end,
    row,  # the first weight row
    num_rows,  # of weights
    stride,
    BLOCK_N: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """The scales of weight rows in a group of 128 columns: one, [BLOCK_N], or none."""
    if ONE_BLOCK:
        at = scales + group * stride + row // ROW_GROUP
        scale = tl.load(at, mask=group < end, other=0.0).to(tl.float32)
    elif ROW_GROUP > 0:
        n = row + tl.arange(0, BLOCK_N)
        at = scales + group * stride + n // ROW_GROUP
        scale = tl.load(at, mask=(n < num_rows) & (group < end), other=0.0).to(tl.float32)
    else:
        scale = tl.zeros([1], tl.float32)
    return scale


@triton.jit
def _added(
    acc, w, x, of_x, of_w,
    BY_GROUP: tl.constexpr, ROW_GROUP: tl.constexpr, ONE_BLOCK: tl.constexpr,
    PROMOTE: tl.constexpr,
):  # fmt: skip
    """Add the products of a step."""
    if BY_GROUP:
        part = tl.dot(w, x.T)
        factor = of_x
        if ONE_BLOCK:
            factor *= of_w
        elif ROW_GROUP > 0:
            part *= of_w[:, None]
        acc += part * factor[None, :]
    elif PROMOTE:
        acc += tl.dot(w, x.T)
    else:
        acc = tl.dot(w, x.T, acc)
    return acc


@triton.jit
def _store_coded(
    y,  # [128, BLOCK_M], the columns of a span
    out,  # [M, row bytes] e4m3
    scales,  # the same memory, as float32, from the first row's scales on
    span,
    m,
    num_rows,
    row_bytes,
    BLOCK_M: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Store columns of the output as codes, with a scale for each row and these 128 columns."""
    inside = m < num_rows
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(y), 0), 1e-12), 448.0)
    row = m.to(tl.int64) * row_bytes
    tl.store(scales + row // 4 + span, scale, mask=inside)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    codes = codes_of(y, inverse[None, :], HARDWARE)
    codes = tl.permute(tl.reshape(codes, [2, 64, BLOCK_M]), (2, 1, 0))
    codes = tl.reshape(codes, [BLOCK_M, 128])
    at = row[:, None] + span * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, codes, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_rows", "split_k"])
def _coded_kernel(
    w_source,  # descriptor of, or pointer to, codes [N, W]; gated: [2 N, W]
    x_source,  # descriptor of, or pointer to, codes [M, W] of coded rows
    weight,  # pointer to the codes of the weights
    x_scales,  # [M, ROW_FLOATS] float32, from the scales of the first row on
    scales,  # [K / 128, rows / ROW_GROUP], or [N] or [2 N] factors of whole rows
    bias,  # [N] or [2 N]
    residual,  # [M, N]
    out,  # [M, N], or [split_k, M, N] parts, or coded rows
    out_scales,  # `out` as float32 from the first row's scales on, if it is coded rows
    num_rows,  # M
    num_outputs,  # N
    num_codes,  # W, K in whole spans
    stride,  # of `scales`
    span,  # codes of one part, a multiple of BLOCK_K
    split_k,  # number of parts
    out_bytes,  # of a coded row of `out`
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_FLOATS: tl.constexpr,  # a coded row, counted as float32; a constant, to spare registers
    BY_GROUP: tl.constexpr,  # of x; BLOCK_K is 128
    ROW_GROUP: tl.constexpr,  # weight rows that share a scale of 128 columns; 0 = whole rows
    ONE_BLOCK: tl.constexpr,  # all weight rows of a tile are in one such group
    PROMOTE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CODED: tl.constexpr,  # the output is coded rows with scales of groups; BLOCK_N is 128
    TMA: tl.constexpr,
    EARLY: tl.constexpr,  # bytes of a weight row prefetched before the input is ready
    HARDWARE: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(1) // split_k  # consecutive programs read the same weights
    part = tl.program_id(1) % split_k
    n_start, m_start = block * BLOCK_N, tl.program_id(0) * BLOCK_M
    k_start = part * span
    k_end = tl.minimum(k_start + span, num_codes)
    n, m = n_start + tl.arange(0, BLOCK_N), m_start + tl.arange(0, BLOCK_M)
    up, up_start = n + num_outputs, n_start + num_outputs
    is_n, is_m = n < num_outputs, m < num_rows
    total_rows = num_outputs
    if MODE == 2:
        total_rows = 2 * num_outputs
    if EARLY >= 128:
        line = k_start + tl.arange(0, EARLY // 128) * 128
        at = tl.minimum(n, num_outputs - 1)[:, None] * num_codes + line[None, :]
        at = tl.minimum(at, num_outputs * num_codes - 1)
        fetch_early(weight + at)
        if MODE == 2:
            fetch_early(weight + num_outputs * num_codes + at)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    AHEAD: tl.constexpr = 1 if BLOCK_M <= 64 else 0  # else registers lack room for two sets
    end = k_end // 128
    of_x = tl.zeros([BLOCK_M], tl.float32)
    of_w = _of_weights(
        *(scales, k_start // 128, end, n_start, total_rows, stride),
        *(BLOCK_N, ROW_GROUP, ONE_BLOCK),
    )
    of_w_up = of_w
    if MODE == 2:
        of_w_up = _of_weights(
            *(scales, k_start // 128, end, up_start, total_rows, stride),
            *(BLOCK_N, ROW_GROUP, ONE_BLOCK),
        )
    if BY_GROUP and AHEAD:  # loaded a step ahead
        of_x = tl.load(x_scales + m * ROW_FLOATS + k_start // 128, mask=is_m, other=0.0)
    for k in range(k_start, k_end, BLOCK_K):
        w = _tile(w_source, n_start, k, total_rows, num_codes, BLOCK_N, BLOCK_K, TMA)
        x = _rows(x_source, m_start, k, num_rows, num_codes, ROW_FLOATS, BLOCK_M, BLOCK_K, TMA)
        now_x, now_w, now_w_up = of_x, of_w, of_w_up
        if BY_GROUP:
            group = k // 128 + AHEAD
            own = x_scales + m * ROW_FLOATS + group
            of_x = tl.load(own, mask=is_m & (group < end), other=0.0)
            if not AHEAD:
                now_x = of_x
            ahead = k // 128 + 1
            of_w = _of_weights(
                *(scales, ahead, end, n_start, total_rows, stride),
                *(BLOCK_N, ROW_GROUP, ONE_BLOCK),
            )
            of_w_up = of_w
            if MODE == 2:
                of_w_up = _of_weights(
                    *(scales, ahead, end, up_start, total_rows, stride),
                    *(BLOCK_N, ROW_GROUP, ONE_BLOCK),
                )
        acc = _added(acc, w, x, now_x, now_w, BY_GROUP, ROW_GROUP, ONE_BLOCK, PROMOTE)
        if MODE == 2:
            w = _tile(w_source, up_start, k, total_rows, num_codes, BLOCK_N, BLOCK_K, TMA)
            acc_up = _added(
                *(acc_up, w, x, now_x, now_w_up, BY_GROUP, ROW_GROUP, ONE_BLOCK, PROMOTE)
            )

    if not BY_GROUP:
        scale = tl.load(x_scales + m * ROW_FLOATS, mask=is_m, other=0.0)
        acc *= scale[None, :]
        acc_up *= scale[None, :]
    if ROW_GROUP == 0:
        acc *= tl.load(scales + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
        if MODE == 2:
            acc_up *= tl.load(scales + up, mask=is_n, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        if part == 0:
            acc += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
            if MODE == 2:
                acc_up += tl.load(bias + up, mask=is_n, other=0.0).to(tl.float32)[:, None]
    inside = is_n[:, None] & is_m[None, :]
    if MODE == 2:
        acc = gated(acc, acc_up, ACTIVATION)
    if CODED:  # rounded first, as if it were numbers that are coded later
        y = tl.where(is_n[:, None], acc, 0.0).to(DTYPE).to(tl.float32)
        _store_coded(y, out, out_scales, block, m, num_rows, out_bytes, BLOCK_M, HARDWARE)
    elif MODE == 1:
        at = (part * num_rows + m)[None, :] * num_outputs + n[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
    else:
        at = m[None, :] * num_outputs + n[:, None]
        if RESIDUAL:
            acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(DTYPE), mask=inside)


@triton.jit
def _rows(
    source, row, k, num_rows, num_codes,
    ROW_FLOATS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load the codes [ROWS, BLOCK_K] of coded rows, with zeros beyond their end."""
    if TMA:
        tile = source.load([row, k])
    else:
        r, c = row + tl.arange(0, ROWS), k + tl.arange(0, BLOCK_K)
        inside = (r < num_rows)[:, None] & (c < num_codes)[None, :]
        tile = tl.load(source + r[:, None] * (4 * ROW_FLOATS) + c[None, :], mask=inside, other=0.0)
    return tile


def multiply(
    x: Tensor,
    weight: TiledWeight,
    choice: Codes,
    dtype: torch.dtype,
    mode: int = PLAIN,
    bias: Tensor | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
    coding: Coding | None = None,
    tma: bool | None = None,
) -> Tensor:
    """See `kernels.packed.linear`, whose operations are the modes.

    x [M, row bytes] uint8 is coded as `choice` says. The output has `dtype`; if `coding` is given
    and `codes_output` is True it is coded rows instead. `tma` overrides whether descriptors load
    the tiles.
    """
    source = Coding(weight.columns, choice.by_group > 0)
    assert choice.block_k == SPAN or not choice.by_group
    result, arguments = coded_arguments(
        x, weight, choice, dtype, mode, bias, activation, residual, coding
    )
    num_outputs, split_k = arguments["num_outputs"], arguments["split_k"]
    codes = weight.words.view(torch.float8_e4m3fn)  # [N, W]
    span = triton.cdiv(triton.cdiv(source.num_codes, split_k), choice.block_k) * choice.block_k
    x_codes = x.view(torch.float8_e4m3fn)
    w_source, x_source = codes, x_codes
    if tma is None:
        tma = has_tma(x) and fits_tma(codes, x)
    if tma:
        w_source = TensorDescriptor.from_tensor(codes, [choice.block_n, choice.block_k])
        x_source = TensorDescriptor.from_tensor(
            x_codes[:, : source.num_codes], [choice.block_m, choice.block_k]
        )
    options = pdl_options(x)
    early = choice.early if options["PDL"] else 0
    while early > span:
        early //= 2
    blocks = triton.cdiv(num_outputs, choice.block_n)
    _coded_kernel[(triton.cdiv(x.shape[0], choice.block_m), blocks * split_k)](
        w_source,
        x_source,
        codes,
        **arguments,
        num_codes=source.num_codes,
        span=span,
        BLOCK_M=choice.block_m,
        BLOCK_K=choice.block_k,
        ONE_BLOCK=arguments["ROW_GROUP"] > 0
        and weight.row_group % choice.block_n == 0
        and not weight.shape[0] % choice.block_n
        and not num_outputs % choice.block_n,
        TMA=tma,
        EARLY=early,
        HARDWARE=not x.is_cpu,
        num_warps=choice.num_warps,
        num_stages=choice.stages,
        **options,
    )
    return result


hash_functions(globals())
