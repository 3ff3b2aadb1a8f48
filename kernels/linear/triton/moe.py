"""Triton version of `kernels.linear.moe.run_experts`: two matrix products grouped by expert.

A first kernel lists the rows of each expert. Then programs multiply a tile of an expert's weights
with its rows. With few rows, as in decode and verify steps, all rows of an expert fit into a tile,
so the weights pass the GPU once. They are the left operand, so that they and not padding fill the
smallest shape of the tensor cores. Launches depend on shapes only, so a graph may hold them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import fits_tma, has_tma, hash_functions, pdl_options, wait_for_inputs
from ..experts import ExpertWeights
from .one_row_experts import activated, activation_options, run_one_row

FEW = 256  # up to this number of rows, float32 parts are small
_PAIRS = 1024  # (row, choice) pairs that the listing kernel reads at a time


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of one of the two products."""

    block_n: int  # weight rows of a program
    block_k: int
    stages: int
    num_warps: int


@triton.jit(do_not_specialize=["num_pairs", "most"])
def _list_kernel(
    ids,  # [T * k] int32 or int64; below 0: of no expert here
    experts,  # [C] int32
    counts,  # [C] int32, pairs of the candidate; 0 = it has no work
    order,  # [C, T] int32, its pairs in ascending order
    num_pairs,
    most,  # T, the most pairs of an expert
    BY_PAIR: tl.constexpr,  # candidate i is the expert of pair i; otherwise expert i
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the pairs of one candidate. By pair, only the first pair of an expert lists any."""
    wait_for_inputs(PDL)
    candidate = tl.program_id(0)
    expert = candidate
    if BY_PAIR:
        expert = tl.load(ids + candidate).to(tl.int32)
    count, earlier = 0, 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) == expert
        own = own & (expert >= 0)
        place = count + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(order + candidate.to(tl.int64) * most + place, pair, mask=own)
        count += tl.sum(own.to(tl.int32), 0)
        if BY_PAIR:
            earlier += tl.sum((own & (pair < candidate)).to(tl.int32), 0)
    if earlier > 0:
        count = 0
    tl.store(experts + candidate, expert)
    tl.store(counts + candidate, count)


@triton.jit
def store_products(
    acc,  # [BLOCK_N, BLOCK_M] float32, products of the expert's rows; gated: of gate
    acc_up,  # gated: of up
    bias,  # [E, N] or [E, 2 N]
    pair_weights,  # [T * k] float32
    out,  # gated: [T * k, N] by pair; else [k, T, N]
    expert,
    pair,  # [BLOCK_M]
    valid,  # [BLOCK_M]
    n,  # [BLOCK_N]
    inside_n,  # [BLOCK_N]
    most,  # T
    N,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Add the biases, then store activated values, or products times the weights of the pairs."""
    HALVES: tl.constexpr = 2 if GATED else 1
    if BIAS:
        of_expert = bias + expert * (HALVES * N) + n
        acc += tl.load(of_expert, mask=inside_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(of_expert + N, mask=inside_n, other=0.0).to(tl.float32)[:, None]
    there = inside_n[:, None] & valid[None, :]
    if GATED:
        result = activated(acc, acc_up, out.dtype.element_ty, ACTIVATION, ALPHA, LIMIT)
        tl.store(out + pair.to(tl.int64)[None, :] * N + n[:, None], result, mask=there)
    else:
        share = tl.load(pair_weights + pair, mask=valid, other=0.0)
        target = ((pair % TOP_K) * most + pair // TOP_K).to(tl.int64)
        result = (acc * share[None, :]).to(out.dtype.element_ty)
        tl.store(out + target[None, :] * N + n[:, None], result, mask=there)


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
    count = tl.load(counts + candidate)
    begin = tl.program_id(2) * BLOCK_M
    if begin >= count:
        return
    expert = tl.load(experts + candidate)
    HALVES: tl.constexpr = 2 if GATED else 1
    n_start = tl.program_id(0) * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    first_row = expert * (HALVES * N) + n_start
    inside_n = n < N
    k = tl.arange(0, BLOCK_K)
    for first in range(begin, count, SPLITS * BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        valid = row < count
        pair = tl.load(order + candidate.to(tl.int64) * most + row, mask=valid, other=0)
        if GATED:
            rows = x + (pair // TOP_K).to(tl.int64) * K
        else:
            rows = x + pair.to(tl.int64) * K
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


def rows_of_tile(num_rows: int, top_k: int, num_experts: int) -> int:
    """BLOCK_M for a step: most experts have no more rows if tokens choose them alike."""
    mean = num_rows * top_k / num_experts
    if num_rows <= 16 or mean <= 6:
        return 16
    return 32 if mean <= 16 else 64 if mean <= 48 else 128


def tiles_of(block_m: int, gated: bool, element_size: int = 2) -> Tiles:
    """Tiles of a product, in the pattern of those measured for dense layers."""
    if block_m == 128:
        tiles = Tiles(128, 64, 3 if gated else 4, 8)
    elif gated:
        tiles = Tiles(64, 128, 3, 4) if block_m == 16 else Tiles(64, 64, 4, 4)
    else:
        tiles = Tiles(64, 128, 4 if block_m <= 32 else 3, 4)
    return tiles if element_size <= 2 else replace(tiles, block_k=tiles.block_k // 2)


def list_rows(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the pairs of each expert that ids [T, k] choose.

    Returns (experts [C], counts [C], order [C, T]); C candidates suffice for any ids. A count of 0
    means that the candidate has no work.
    """
    num_rows, top_k = ids.shape
    pairs = num_rows * top_k
    candidates = min(pairs, num_experts)
    listed = torch.empty(2, candidates, dtype=torch.int32, device=ids.device)
    order = torch.empty(candidates, num_rows, dtype=torch.int32, device=ids.device)
    _list_kernel[(candidates,)](
        ids, listed[0], listed[1], order, pairs, num_rows,
        BY_PAIR=pairs < num_experts, BLOCK=_PAIRS, num_warps=4, **pdl_options(ids),
    )  # fmt: skip
    return listed[0], listed[1], order


def empty_parts(x: Tensor, top_k: int, spare: int, absent: bool = False) -> Tensor:
    """Memory for the parts of rows x [T, H]: [k + spare, T, H] float32; for many rows [k, T, H] in
    the dtype of x. It is zero if some experts are `absent`, whose parts nothing writes."""
    few = x.shape[0] <= FEW
    shape = (top_k + spare if few else top_k, *x.shape)
    create = torch.zeros if absent else torch.empty
    return create(shape, dtype=torch.float32 if few else x.dtype, device=x.device)


def run_experts(
    x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor, absent: bool = False
) -> Tensor:
    """See `kernels.linear.moe.run_experts`."""
    if x.shape[0] == 0:
        return torch.zeros_like(x)
    return whole(expert_parts(x, experts, weights, ids, absent=absent), x)


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


def whole(parts: Tensor, x: Tensor) -> Tensor:
    """The sum of parts [S, T, H] in the dtype of x; a whole [T, H] as it is."""
    return parts if parts.dim() == 2 else parts.sum(0, dtype=torch.float32).to(x.dtype)


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
) -> Tensor:
    """See `kernels.linear.moe.expert_parts`, and `run_experts` for `absent`.

    `tiles` (for both products) and `tma` (whether descriptors load the weights) override what is
    chosen by shape. `fixed`: one row, a few and many have the same arithmetic; returns
    [k, T, H] in the dtype of x.
    """
    assert experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    num_rows, hidden = x.shape
    if num_rows == 1 and not absent and not fixed:
        return run_one_row(x, experts, weights, ids)
    top_k, few = ids.shape[1], num_rows <= FEW and not fixed
    num_experts, _, inner_size = experts.down.shape
    pairs = num_rows * top_k
    chosen, counts, order = list_rows(ids, num_experts)
    inner = torch.empty(pairs, inner_size, dtype=x.dtype, device=x.device)
    parts = x.new_empty(top_k, *x.shape) if fixed else empty_parts(x, top_k, spare, absent)
    block_m = rows_of_tile(num_rows, top_k, num_experts)
    splits = 1 if few else triton.next_power_of_2(triton.cdiv(pairs, num_experts * block_m))
    width = x.element_size()
    first, second = tiles or (tiles_of(block_m, True, width), tiles_of(block_m, False, width))
    for is_gated, size, source, own, bias, out in (
        (True, first, x, experts.gate_up, experts.gate_up_bias, inner),
        (False, second, inner, experts.down, experts.down_bias, parts),
    ):
        flat = own.view(-1, own.shape[2])
        outputs = inner_size if is_gated else hidden
        by_descriptor = has_tma(x) and fits_tma(flat) if tma is None else tma
        block = [size.block_n, size.block_k]
        _tile_kernel[(triton.cdiv(outputs, size.block_n), len(chosen), splits)](
            TensorDescriptor.from_tensor(flat, block) if by_descriptor else flat,
            source,
            x if bias is None else bias,
            chosen,
            counts,
            order,
            weights,
            out,
            num_rows,
            outputs,
            flat.shape[1],
            TOP_K=top_k,
            SPLITS=splits,
            GATED=is_gated,
            BIAS=bias is not None,
            **activation_options(experts),
            BLOCK_N=size.block_n,
            BLOCK_M=block_m,
            BLOCK_K=size.block_k,
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
            TMA=by_descriptor,
            num_warps=size.num_warps,
            num_stages=size.stages,
            enable_fp_fusion=not fixed,  # or tiles might fuse differently
            **pdl_options(x),
        )
    return parts if few or fixed else whole(parts, x)


hash_functions(globals())
