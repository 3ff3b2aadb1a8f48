"""Triton experts whose matrices are fp4 numbers.

It works as `kernels.linear.triton.moe`, but a tile of words becomes four tiles of numbers in
registers, so that a step reads 4 bits of each weight.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...launch import fits_tma, has_tma, hash_functions, pdl_options, wait_for_inputs
from ...linear.experts import PackedExperts
from ...linear.triton.moe import (
    FEW,
    empty_parts,
    list_rows,
    rows_of_tile,
    store_products,
    whole,
)
from ...linear.triton.one_row_experts import activation_options
from ...quant.tiled import TiledWeight
from ...quant.triton.packed_codes import numbers
from ...quant.triton.packed_scales import fp4_scales, scaled

_MOST_ROWS = 64  # of a tile: the numbers of a tile of words need registers, too
_BLOCK_N = 64


@triton.jit
def _load_words(source, row, inside, word, num_words, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        words = source.load([row, word])
    else:
        column = word + tl.arange(0, 64)
        at = (row + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * num_words + column[None, :]
        words = tl.load(source + at, mask=inside[:, None], other=0)
    return words


@triton.jit(do_not_specialize=["most"])
def _packed_experts_kernel(
    source,  # descriptor of, or pointer to, the words [E * N, W]; gated: [E * 2 N, W]
    scales,  # [E * N, groups] uint8; gated: [E * 2 N, groups]
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
    num_words,  # W
    num_groups,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share the rows of an expert
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
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
    row_n = first_row + tl.arange(0, BLOCK_N)
    inside_n = n < N
    no_zeros = inside_n, inside_n, inside_n, inside_n
    k = tl.arange(0, 64)
    dtype: tl.constexpr = x.dtype.element_ty
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
        for start in range(0, K, 256):
            words = _load_words(source, first_row, inside_n, start // 4, num_words, BLOCK_N, TMA)
            tiles = numbers(words, no_zeros, 3, dtype, False, ASSEMBLY)
            factors = fp4_scales(scales, num_groups, start, row_n, inside_n, num_groups, GROUP)
            tiles_up, factors_up = tiles, factors
            if GATED:
                words = _load_words(
                    source, first_row + N, inside_n, start // 4, num_words, BLOCK_N, TMA
                )
                tiles_up = numbers(words, no_zeros, 3, dtype, False, ASSEMBLY)
                factors_up = fp4_scales(
                    scales, num_groups, start, row_n + N, inside_n, num_groups, GROUP
                )
            for i in tl.static_range(4):
                column = start + i * 64 + k
                own = tl.load(
                    rows[:, None] + column[None, :],
                    mask=valid[:, None] & (column < K)[None, :],
                    other=0.0,
                )
                w = scaled(tiles[i], factors[i], GROUP, E8M0)
                acc = tl.dot(w, own.T, acc, input_precision=PRECISION)
                if GATED:
                    w = scaled(tiles_up[i], factors_up[i], GROUP, E8M0)
                    acc_up = tl.dot(w, own.T, acc_up, input_precision=PRECISION)
        store_products(
            acc, acc_up, bias, pair_weights, out, expert, pair, valid, n, inside_n, most, N,
            TOP_K, GATED, BIAS, ACTIVATION, ALPHA, LIMIT,
        )  # fmt: skip


def expert_parts(
    x: Tensor,
    experts: PackedExperts,
    weights: Tensor,
    ids: Tensor,
    spare: int = 0,
    tma: bool | None = None,
) -> Tensor:
    """See `kernels.packed.experts.packed_expert_parts`; `tma` overrides whether descriptors load
    the words."""
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    num_rows, hidden = x.shape
    top_k, count = ids.shape[1], experts.num_experts
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, TiledWeight) and isinstance(down, TiledWeight)
    pairs = num_rows * top_k
    chosen, counts, order = list_rows(ids, count)
    inner_size = gate_up.shape[0] // (2 * count)
    inner = torch.empty(pairs, inner_size, dtype=x.dtype, device=x.device)
    parts = empty_parts(x, top_k, spare)
    block_m = min(rows_of_tile(num_rows, top_k, count), _MOST_ROWS)
    few = num_rows <= FEW
    splits = 1 if few else triton.next_power_of_2(triton.cdiv(pairs, count * block_m))
    for is_gated, source, own, bias, out in (
        (True, x, gate_up, experts.gate_up_bias, inner),
        (False, inner, down, experts.down_bias, parts),
    ):
        assert own.kind == "fp4" and own.global_scale is None and own.order is None
        outputs = inner_size if is_gated else hidden
        by_descriptor = has_tma(x) and fits_tma(own.words) if tma is None else tma
        _packed_experts_kernel[(triton.cdiv(outputs, _BLOCK_N), len(chosen), splits)](
            TensorDescriptor.from_tensor(own.words, [_BLOCK_N, 64]) if by_descriptor else own.words,
            own.scales.view(torch.uint8),
            source,
            x if bias is None else bias,
            chosen,
            counts,
            order,
            weights,
            out,
            num_rows,
            outputs,
            own.columns,
            own.words.shape[1],
            own.scales.shape[1],
            TOP_K=top_k,
            SPLITS=splits,
            GATED=is_gated,
            BIAS=bias is not None,
            **activation_options(experts),
            BLOCK_N=_BLOCK_N,
            BLOCK_M=block_m,
            GROUP=own.group,
            E8M0=own.scales.dtype == torch.uint8,
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
            ASSEMBLY=not x.is_cpu,
            TMA=by_descriptor,
            num_warps=4,
            num_stages=3 if is_gated else 4,
            **pdl_options(x),
        )
    return parts if few else whole(parts, x)


hash_functions(globals())
