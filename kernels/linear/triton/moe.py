"""Triton version of `kernels.linear.moe.run_experts`: two matrix products grouped by expert.

A first kernel lists the rows of each expert. Then programs multiply a tile of an expert's weights
with its rows. With few rows, as in decode and verify steps, all rows of an expert fit into a tile,
so the weights pass the GPU once. They are the left operand, so that they and not padding fill the
smallest shape of the tensor cores. Launches depend on shapes only, so a graph may hold them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...device import card_of
from ...launch import fits_tma, has_tma, hash_functions, pdl_options, wait_for_inputs
from ..experts import ExpertWeights, whole
from .expert_rows import FEW, Work, both_products, rows_of, store_products, work_for, work_of
from .one_row_experts import activation_options, run_one_row

if TYPE_CHECKING:
    from ..grouped.triton.hopper_experts import Form


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of one of the two products."""

    block_n: int  # weight rows of a program
    block_k: int
    stages: int
    num_warps: int


@triton.jit(do_not_specialize=["most"])
def _tile_kernel(
    source,  # descriptor of, or pointer to, the weights [E * N, K]; gated: [E * 2 N, K]
    x,  # gated: [T, K]; else [T * k, K] by pair
    bias,  # [E, N] or [E, 2 N]
    experts,  # [C] int32
    counts,  # [C] int32
    order,  # [C, T] int32
    pair_weights,  # [T * k] float32
    out,  # gated: [T * k, N] by pair; else [k, T, N]
    most,  # T
    N,
    K,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share the rows of an expert
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of N, candidate, split): the tile's weights times its share of the rows."""
    wait_for_inputs(PDL)
    candidate = tl.program_id(1)
    expert, count = work_of(experts, counts, candidate, False)
    begin = tl.program_id(2) * BLOCK_M
    if begin >= count:
        return
    HALVES: tl.constexpr = 2 if GATED else 1
    n_start = tl.program_id(0) * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    first_row = expert * (HALVES * N) + n_start
    inside_n = n < N
    k = tl.arange(0, BLOCK_K)
    for first in range(begin, count, SPLITS * BLOCK_M):
        rows, pair, valid = rows_of(
            x, order, candidate, first, count, most, K, BLOCK_M, TOP_K, GATED, False
        )
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = acc
        for start in range(0, K, BLOCK_K):
            in_k = start + k < K
            if TMA:
                w = source.load([first_row, start])
            else:
                at = (first_row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * K + start + k
                w = tl.load(source + at, mask=inside_n[:, None] & in_k[None, :], other=0.0)
            own = tl.load(
                rows[:, None] + start + k[None, :], mask=valid[:, None] & in_k[None, :], other=0.0
            )
            acc = tl.dot(w, own.T, acc, input_precision=PRECISION)
            if GATED:
                if TMA:
                    up = source.load([first_row + N, start])
                else:
                    at = (first_row + N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * K
                    at += start + k
                    up = tl.load(source + at, mask=inside_n[:, None] & in_k[None, :], other=0.0)
                acc_up = tl.dot(up, own.T, acc_up, input_precision=PRECISION)
        store_products(
            acc, acc_up, bias, pair_weights, out, expert, pair, valid, n, inside_n, most, N,
            TOP_K, GATED, BIAS, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip


HOPPER_ROWS = (2, 128)  # the fewest and the most rows for which `hopper_experts` was measured


def tiles_of(block_m: int, gated: bool, element_size: int = 2) -> Tiles:
    """Tiles of a product, in the pattern of those measured for dense layers."""
    if block_m == 128:
        tiles = Tiles(128, 64, 3 if gated else 4, 8)
    elif gated:
        tiles = Tiles(64, 128, 3, 4) if block_m == 16 else Tiles(64, 64, 4, 4)
    else:
        tiles = Tiles(64, 128, 4 if block_m <= 32 else 3, 4)
    return tiles if element_size <= 2 else replace(tiles, block_k=tiles.block_k // 2)


def run_experts(
    x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor, absent: bool = False
) -> Tensor:
    """See `kernels.linear.moe.run_experts`."""
    if x.shape[0] == 0:
        return torch.zeros_like(x)
    return whole(expert_parts(x, experts, weights, ids, absent=absent, narrow=FEW + 1), x)


def add_experts(
    x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor, residual: Tensor
) -> Tensor:
    """See `kernels.linear.moe.add_experts`."""
    assert x.shape == residual.shape and residual.stride(1) == 1
    return run_one_row(x.contiguous(), experts, weights.contiguous(), ids.contiguous(), residual)


def run_experts_fixed(x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor) -> Tensor:
    """`run_experts` with the same rounding for every number of rows.

    The parts have the dtype of x, and are added in the order of `ids`, in float32.
    """
    if x.shape[0] == 0:
        return torch.zeros_like(x)
    parts = expert_parts(x, experts, weights, ids, fixed=True)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)


def expert_parts(
    x: Tensor,
    experts: ExpertWeights,
    weights: Tensor,
    ids: Tensor,
    spare: int = 0,
    tiles: tuple[Tiles, Tiles] | None = None,
    tma: bool | None = None,
    absent: bool = False,
    fixed: bool = False,
    narrow: int | None = None,
    form: Form | None = None,
) -> Tensor:
    """See `kernels.linear.moe.expert_parts`, and `run_experts` for `absent`.

    `tiles` (for both products) and `tma` (whether descriptors load the weights) override what is
    chosen by shape. `fixed`: one row, a few and many have the same arithmetic; returns [k, T, H] in
    the dtype of x. `narrow` overrides the number of rows from which on parts have the dtype of x.
    With `form`, or for the numbers of rows in `HOPPER_ROWS`, the warp-specialised kernel multiplies
    if it fits.
    """
    assert experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    if x.shape[0] == 1 and not absent and not fixed:
        return run_one_row(x.contiguous(), experts, weights.contiguous(), ids.contiguous())
    work = work_for(weights, ids, len(experts.down), 128)
    width = x.element_size()
    first, second = tiles or tuple(tiles_of(work.block_m, g, width) for g in (True, False))

    wanted = form is not None or (HOPPER_ROWS[0] <= work.num_rows <= HOPPER_ROWS[1] and not fixed)
    specialised = _specialised(x, experts, work, form) if wanted and tiles is None else None

    def multiply(gated: bool, source: Tensor, out: Tensor) -> None:
        if specialised is not None:
            specialised(gated, source, experts, work, out)
            return
        size, own = (first, experts.gate_up) if gated else (second, experts.down)
        bias = experts.gate_up_bias if gated else experts.down_bias
        flat = own.view(-1, own.shape[2])
        outputs = own.shape[1] // (2 if gated else 1)
        by_descriptor = has_tma(x) and fits_tma(flat) if tma is None else tma
        block = [size.block_n, size.block_k]
        _tile_kernel[work.grid(outputs, size.block_n)](
            TensorDescriptor.from_tensor(flat, block) if by_descriptor else flat,
            source,
            x if bias is None else bias,
            work.experts,
            work.counts,
            work.order,
            work.weights,
            out,
            work.num_rows,
            outputs,
            flat.shape[1],
            TOP_K=work.top_k,
            SPLITS=work.splits,
            GATED=gated,
            BIAS=bias is not None,
            **activation_options(experts),
            BLOCK_N=size.block_n,
            BLOCK_M=work.block_m,
            BLOCK_K=size.block_k,
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
            TMA=by_descriptor,
            num_warps=size.num_warps,
            num_stages=size.stages,
            enable_fp_fusion=not fixed,  # or tiles might fuse differently
            **pdl_options(x),
        )

    return both_products(x, experts.down.shape[2], work, multiply, spare, absent, fixed, narrow)


def _specialised(
    x: Tensor, experts: ExpertWeights, work: Work, form: Form | None
) -> Callable[..., None] | None:
    """The warp-specialised product for this GPU; None if it does not fit."""
    from ..grouped.triton import hopper_experts  # which needs Gluon

    card, form = card_of(x.device), form or hopper_experts.Form()
    if not has_tma(x) or card is None or not hopper_experts.fits(x, experts, work, form):
        return None
    programs = card.num_processors
    return partial(hopper_experts.multiply_experts, form=form, programs=programs)


hash_functions(globals())
