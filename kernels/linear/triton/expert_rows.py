"""Which rows each expert of a step has, and what happens to their products: shared by the kernels
of plain and of quantised experts.

A first kernel lists the rows of each expert. Then programs multiply a tile of an expert's weights
with its rows, in two products: gate and up, and down. Launches depend on shapes only, so a graph
may hold them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..experts import whole
from .one_row_experts import activated

FEW = 256  # up to this number of rows, the next kernel sums the parts
# From this number of rows on, parts have the dtype of x; below they are float32. Parts of 16 bits
# save up to 1 % of a step, and let rounding move the choice of experts more often.
NARROW = FEW + 1
_PAIRS = 1024  # (row, choice) pairs that the listing kernel reads at a time
_FEW_PAIRS = 256  # up to this number one warp reads them at once, which needs no barriers


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
def work_of(experts, counts, candidate, ONE_ROW: tl.constexpr):
    """A candidate's expert and the number of its pairs.

    Of a single row, `experts` are the ids that it chose, so that nothing must list its pairs.
    """
    expert = tl.load(experts + candidate).to(tl.int32)
    if ONE_ROW:
        count = (expert >= 0).to(tl.int32)
    else:
        count = tl.load(counts + candidate)
    return expert, count


@triton.jit
def rows_of(
    x,  # gated: [T, K]; else [T * k, K] by pair
    order,
    candidate,
    first,
    count,
    most,
    K,
    BLOCK_M: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Some rows of x for a candidate, from its pair number `first` on: pointers to the rows, the
    pairs, and which of them exist; each [BLOCK_M]."""
    row = first + tl.arange(0, BLOCK_M)
    valid = row < count
    if ONE_ROW:
        pair = candidate + row * 0
    else:
        pair = tl.load(order + candidate.to(tl.int64) * most + row, mask=valid, other=0)
    if GATED:
        rows = x + (pair // TOP_K).to(tl.int64) * K
    else:
        rows = x + pair.to(tl.int64) * K
    return rows, pair, valid


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


def rows_of_tile(num_rows: int, top_k: int, num_experts: int) -> int:
    """BLOCK_M for a step: most experts have no more rows if tokens choose them alike."""
    mean = num_rows * top_k / num_experts
    if num_rows <= 16 or mean <= 6:
        return 16
    return 32 if mean <= 16 else 64 if mean <= 48 else 128


@dataclass(frozen=True)
class Work:
    """What the rows of a step want of the experts, for both products."""

    experts: Tensor  # [C] int32, the candidates; of one row the ids [k] that it chose
    counts: Tensor  # [C] int32, see `_list_kernel`; of one row not used, and neither is `order`
    order: Tensor  # [C, T] int32
    weights: Tensor  # [T * k] float32
    num_rows: int  # T
    top_k: int
    block_m: int  # rows of a tile
    splits: int  # programs that share the rows of an expert
    one_row: bool
    by_pair: bool = False  # candidate i is the expert of pair i; otherwise expert i

    def grid(self, outputs: int, block_n: int) -> tuple[int, int, int]:
        """The programs of a product: by tile of the outputs, candidate and split."""
        return triton.cdiv(outputs, block_n), len(self.experts), self.splits


def work_for(
    weights: Tensor, ids: Tensor, num_experts: int, most_rows: int, one_row: bool = False
) -> Work:
    """List the pairs of each expert that ids [T, k] choose, with their weights [T, k]. A tile has
    at most `most_rows`. With `one_row`, T is 1 and nothing is launched.

    The candidates suffice for any ids, so launches depend on shapes only.
    """
    weights, ids = weights.contiguous(), ids.contiguous()
    num_rows, top_k = ids.shape
    pairs = num_rows * top_k
    if one_row:
        assert num_rows == 1
        chosen = ids.view(-1)
        return Work(chosen, chosen, chosen, weights, 1, top_k, 8, 1, True)
    block_m = min(rows_of_tile(num_rows, top_k, num_experts), most_rows)
    splits = 1
    if num_rows > FEW:
        splits = triton.next_power_of_2(triton.cdiv(pairs, num_experts * block_m))
    candidates, by_pair = min(pairs, num_experts), pairs < num_experts
    block = _FEW_PAIRS if pairs <= _FEW_PAIRS else _PAIRS
    listed = torch.empty(2, candidates, dtype=torch.int32, device=ids.device)
    order = torch.empty(candidates, num_rows, dtype=torch.int32, device=ids.device)
    _list_kernel[(candidates,)](
        ids, listed[0], listed[1], order, pairs, num_rows,
        BY_PAIR=by_pair, BLOCK=block, num_warps=1 if block <= _FEW_PAIRS else 4,
        **pdl_options(ids),
    )  # fmt: skip
    rows = (num_rows, top_k, block_m, splits)
    return Work(listed[0], listed[1], order, weights, *rows, one_row=False, by_pair=by_pair)


def both_products(
    x: Tensor,
    inner_size: int,
    work: Work,
    multiply: Callable[[bool, Tensor, Tensor], None],
    spare: int = 0,
    absent: bool = False,
    fixed: bool = False,
    narrow: int | None = None,
) -> Tensor:
    """Let `multiply(gated, source, out)` compute the inner values of all pairs, [T * k, I], and
    from these the parts that `kernels.linear.moe.expert_parts` returns; if `fixed`, [k, T, H] in
    the dtype of x for any number of rows. See `empty_parts` for `narrow`."""
    x = x.contiguous()
    inner = torch.empty(work.num_rows * work.top_k, inner_size, dtype=x.dtype, device=x.device)
    if fixed:
        parts = x.new_empty(work.top_k, *x.shape)
    else:
        parts = empty_parts(x, work.top_k, spare, absent, narrow)
    multiply(True, x, inner)
    multiply(False, inner, parts)
    return parts if fixed or work.num_rows <= FEW else whole(parts, x)


def empty_parts(
    x: Tensor, top_k: int, spare: int, absent: bool = False, narrow: int | None = None
) -> Tensor:
    """Memory for the parts of rows x [T, H]: [k + spare, T, H] float32; for many rows [k, T, H] in
    the dtype of x. If experts may be `absent`, it is zero,
    because no kernel writes their parts.

    From `narrow` rows on (default `NARROW`) parts without spare ones have the dtype of x, too.
    """
    num_rows = x.shape[0]
    few = num_rows <= FEW
    wide = few and (spare > 0 or num_rows < (NARROW if narrow is None else narrow))
    shape = (top_k + spare if few else top_k, *x.shape)
    create = torch.zeros if absent else torch.empty
    return create(shape, dtype=torch.float32 if wide else x.dtype, device=x.device)


hash_functions(globals())
