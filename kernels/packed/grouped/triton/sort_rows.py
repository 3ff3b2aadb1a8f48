"""Sorts the rows of a step by expert, for `hopper_experts`.

Launches depend on shapes only, so a graph may hold them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import hash_functions, pdl_options, wait_for_inputs
from ....linear.triton.expert_rows import work_for

_SORTED_AT_ONCE = 1024  # up to this number of pairs, each program reads all of them
_COLUMNS = 256  # of a step of `hopper_experts`


@triton.jit
def _copy_row(x, out, row, place, K, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Copy a row of x [T, K] in the order of `_operand`, with zeros up to WIDTH.

    Of 256 columns, the first in a row are those that one instruction of the tensor cores takes from
    the four threads that share a weight row, and so on.
    """
    for start in range(0, WIDTH, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        column = at // 256 * 256 + at % 8 // 2 * 64 + at % 256 // 16 * 4
        column += at % 16 // 8 * 2 + at % 2
        values = tl.load(x + row.to(tl.int64) * K + column, mask=column < K, other=0.0)
        tl.store(out + place.to(tl.int64) * WIDTH + at, values, mask=at < WIDTH)


@triton.jit
def _store_plan(plan, counts, num_experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    each = tl.arange(0, BLOCK_E)
    is_in = each < num_experts
    tl.store(plan + each, tl.cumsum(counts, 0) - counts, mask=is_in)
    tl.store(plan + num_experts + each, counts, mask=is_in)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    tl.store(plan + 2 * num_experts + each, tl.cumsum(blocks, 0), mask=is_in)


@triton.jit(do_not_specialize=["num_pairs"])
def _arrange_kernel(
    ids,  # [T * k] int32 or int64; below 0: of no expert here
    x,  # [T, K]
    plan,  # [3, E] int32, see `hopper_expert_roles`
    pairs,  # [T * k] int32, the pairs sorted by expert
    out,  # [T * k, WIDTH], their rows of x
    num_pairs,
    num_experts,
    K,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # at least T * k
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p finds the place of pair p, and copies its row; the program after the last one
    writes the plan."""
    wait_for_inputs(PDL)
    own = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    if own < num_pairs:
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        expert = tl.load(ids + own).to(tl.int32)
        before = (chosen >= 0) & ((chosen < expert) | ((chosen == expert) & (pair < own)))
        place = tl.sum(before.to(tl.int32), 0)
        if expert >= 0:
            tl.store(pairs + place, own)
            _copy_row(x, out, own // TOP_K, place, K, WIDTH, BLOCK_K)
    else:
        each = tl.arange(0, BLOCK_E)
        counts = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_pairs, 64):
            some = start + tl.arange(0, 64)
            of = tl.load(ids + some, mask=some < num_pairs, other=-1).to(tl.int32)
            counts += tl.sum((of[:, None] == each[None, :]).to(tl.int32), 0)
        _store_plan(plan, counts, num_experts, BLOCK_E, BLOCK_M)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_kernel(
    counts,  # [E] int32
    order,  # [E, T] int32, the pairs of each expert
    x,  # [T, K]
    plan,  # this and the following: see `_arrange_kernel`
    pairs,
    out,
    num_experts,
    num_rows,  # T
    K,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """`_arrange_kernel` for pairs that are listed: program p copies the row of place p."""
    wait_for_inputs(PDL)
    place = tl.program_id(0)
    each = tl.arange(0, BLOCK_E)
    counted = tl.load(counts + each, mask=each < num_experts, other=0)
    ends = tl.cumsum(counted, 0)
    expert = tl.sum((ends <= place).to(tl.int32), 0)
    if place == 0:
        _store_plan(plan, counted, num_experts, BLOCK_E, BLOCK_M)
    if expert < num_experts:
        before = tl.sum(tl.where(each < expert, counted, 0), 0)
        own = tl.load(order + expert.to(tl.int64) * num_rows + (place - before))
        tl.store(pairs + place, own)
        _copy_row(x, out, own // TOP_K, place, K, WIDTH, BLOCK_K)


class SortedRows(NamedTuple):
    """The (row, choice) pairs of a step, sorted by expert."""

    plan: Tensor  # [3, E] int32, see `hopper_expert_roles`
    pairs: Tensor  # [T * k] int32
    rows: Tensor  # [T * k, columns padded to 256], their rows of x, in the order of `_operand`


def arrange(x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, block_m: int) -> SortedRows:
    """Sort the rows of x [T, K] by the experts that ids [T, k] choose with `weights` [T, k], for
    tiles of `block_m` rows.

    Pairs with ids below 0 are left out, and leave memory at the end unwritten.
    """
    num_pairs, top_k = ids.numel(), ids.shape[1]
    width = triton.cdiv(x.shape[1], _COLUMNS) * _COLUMNS
    plan = torch.empty(3, num_experts, dtype=torch.int32, device=x.device)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    rows = x.new_empty(num_pairs, width)
    rest: dict[str, Any] = {"TOP_K": top_k, "WIDTH": width, "BLOCK_K": 1024, "BLOCK_M": block_m}
    rest |= {"BLOCK_E": max(32, triton.next_power_of_2(num_experts)), **pdl_options(x)}
    if num_pairs <= _SORTED_AT_ONCE:
        _arrange_kernel[(num_pairs + 1,)](
            ids, x, plan, pairs, rows, num_pairs, num_experts, x.shape[1],
            BLOCK=triton.next_power_of_2(num_pairs), num_warps=4, **rest,
        )  # fmt: skip
    else:
        work = work_for(weights, ids, num_experts, block_m)
        assert len(work.counts) == num_experts
        _gather_kernel[(num_pairs,)](
            work.counts, work.order, x, plan, pairs, rows, num_experts, len(x), x.shape[1],
            num_warps=4, **rest,
        )  # fmt: skip
    return SortedRows(plan, pairs, rows)


hash_functions(globals())
