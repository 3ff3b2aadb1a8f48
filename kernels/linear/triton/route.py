"""Triton versions of `select_experts` and `own_experts` of `kernels.linear.moe`: a token's experts,
and those of them that a rank has."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from ..experts import Routing

_SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
_LEAST = tl.constexpr(-3e38)  # below any score
_BARRED = tl.constexpr(-3.2e38)  # of an expert in a group that is not chosen
_CLOSED = tl.constexpr(-(1 << 31))  # key of what cannot be chosen


@triton.jit
def _ordered(values):
    """int32 keys in the order of float32 values that are not NaN, all above `_CLOSED`. A warp finds
    the largest integer in one instruction, but the largest float in five steps."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first(keys, place, NONE: tl.constexpr):
    """The first place of the largest key."""
    return tl.min(tl.where(keys == tl.max(keys, 0), place, NONE), 0)


@triton.jit
def _without_groups(
    choice, exists, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """`choice` [BLOCK_G * BLOCK_S], with less than `_LEAST` in all but the best `TOP_GROUPS`."""
    group = tl.arange(0, BLOCK_G)
    scores = tl.reshape(tl.where(exists, choice, float("-inf")), [BLOCK_G, BLOCK_S])
    best = tl.max(scores, 1)
    if TOP2:
        place = tl.arange(0, BLOCK_S)[None, :]
        at = tl.min(tl.where(scores == best[:, None], place, BLOCK_S), 1)
        best += tl.max(tl.where(place == at[:, None], float("-inf"), scores), 1)
    closed = group >= GROUPS
    keys = tl.where(closed, _CLOSED, _ordered(best))
    for _ in tl.static_range(TOP_GROUPS):
        own = group == _first(keys, group, BLOCK_G)
        closed, keys = closed | own, tl.where(own, _CLOSED, keys)
    closed = closed & (group < GROUPS)
    chosen = tl.broadcast_to(closed[:, None], [BLOCK_G, BLOCK_S])
    return tl.where(tl.reshape(chosen, [BLOCK_G * BLOCK_S]), choice, _BARRED)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["token_ids"])
def _select_kernel(
    logits,  # [T, E], or [PARTS, T, E] float32
    bias,  # [E]
    token_ids,  # [T]
    table,  # [V, TOP_K], the experts of each token id
    weights,  # [T, TOP_K] float32
    ids,  # [T, TOP_K] int32
    num_tokens,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,  # 0 = whole
    SCORING: tl.constexpr,  # index in `_SCORINGS`
    BIAS: tl.constexpr,
    TABLE: tl.constexpr,  # the table chooses
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,  # a group's score is the sum of its best two
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,  # >= E / GROUPS
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token. Of equal experts or groups, the first is chosen."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = E // GROUPS
    lane = tl.arange(0, BLOCK_G * BLOCK_S)
    expert, exists = lane, lane < E
    if GROUPS > 1:  # each group begins a row of lanes
        expert = lane // BLOCK_S * SIZE + lane % BLOCK_S
        exists = (lane % BLOCK_S < SIZE) & (lane // BLOCK_S < GROUPS)
    logit = tl.load(logits + token * E + expert, mask=exists, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        own = (part * num_tokens + token) * E + expert
        logit += tl.load(logits + own, mask=exists, other=0.0)
    if SCORING == 1:
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORING == 2:
        small = tl.exp(-tl.abs(logit))  # 1 + small loses the digits of a tiny one
        near = small * (1.0 - small * (0.5 - small / 3.0))
        score = tl.where(small < 1e-3, near, tl.log(1.0 + small))
        score = tl.sqrt(tl.maximum(logit, 0.0) + score)
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        score /= tl.sum(score, 0)
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    if TABLE:
        row = table + tl.load(token_ids + token).to(tl.int64) * TOP_K
        chosen = tl.load(row + place, mask=place < TOP_K, other=-1).to(tl.int32)
        own = exists[None, :] & (expert[None, :] == chosen[:, None])
        weight = tl.sum(tl.where(own, score[None, :], 0.0), 1)
    else:
        choice = score
        if BIAS:
            choice += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
        # NaN would be chosen never or always, but k different experts must be chosen
        choice = tl.where(choice > _LEAST, choice, _LEAST)
        if GROUPS > 1:
            choice = _without_groups(choice, exists, TOP_GROUPS, TOP2, BLOCK_G, BLOCK_S, GROUPS)
        keys = tl.where(exists, _ordered(choice), _CLOSED)
        bits = score.to(tl.int32, bitcast=True)
        for index in tl.static_range(TOP_K):
            at = _first(keys, expert, E)
            own_score = tl.sum(tl.where(expert == at, bits, 0), 0).to(tl.float32, bitcast=True)
            chosen = tl.where(place == index, at, chosen)
            weight = tl.where(place == index, own_score, weight)
            keys = tl.where(expert == at, _CLOSED, keys)
    if RENORMALISE:
        weight /= tl.sum(weight, 0) + 1e-20
    target = token * TOP_K + place
    tl.store(ids + target, chosen, mask=place < TOP_K)
    tl.store(weights + target, weight * scale, mask=place < TOP_K)


def select_experts(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    listed: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.linear.moe.select_experts`. ids are int32."""
    assert logits.is_contiguous()
    parts = logits.shape[0] if logits.dim() == 3 else 0
    num_tokens, num_experts = logits.shape[-2:]
    groups = 1 if listed is not None else routing.num_groups
    assert num_experts % groups == 0
    shape = (num_tokens, routing.top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return weights, ids
    token_ids, table = (ids, ids) if listed is None else listed
    assert table.is_contiguous() and token_ids.stride(-1) == 1
    _select_kernel[(num_tokens,)](
        logits,
        logits if bias is None else bias,
        token_ids,
        table,
        weights,
        ids,
        num_tokens,
        routing.scale,
        E=num_experts,
        TOP_K=routing.top_k,
        PARTS=parts,
        SCORING=_SCORINGS.index(routing.scoring),
        BIAS=bias is not None and listed is None,
        TABLE=listed is not None,
        RENORMALISE=routing.renormalise,
        GROUPS=groups,
        TOP_GROUPS=routing.top_groups if groups > 1 else 1,
        TOP2=groups > 1 and routing.group_score == "top2",
        BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_S=triton.next_power_of_2(num_experts // groups),
        BLOCK_K=triton.next_power_of_2(routing.top_k),
        num_warps=1 if num_experts <= 256 else 4,
        **pdl_options(logits),
    )
    return weights, ids


@triton.jit(do_not_specialize=["num_pairs", "rows", "first", "count"])
def _own_kernel(
    ids,  # [D * R, TOP_K] int32
    here,  # [D * R, TOP_K] int32
    num_rows,  # [D] int32
    loads,  # [1 + count] int64
    num_pairs,
    rows,  # R
    first,
    count,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    row = pair // TOP_K
    real = inside & (row % rows < tl.load(num_rows + row // rows, mask=inside, other=0))
    expert = tl.load(ids + pair, mask=inside, other=-1) - first
    own = real & (expert >= 0) & (expert < count)
    tl.store(here + pair, tl.where(own, expert, -1), mask=inside)
    tl.atomic_add(loads + 1 + expert, own.to(tl.int64), mask=own, sem="relaxed")
    elsewhere = tl.sum((real & ~own).to(tl.int64), 0)
    tl.atomic_add(loads, elsewhere, sem="relaxed")


def own_experts(ids: Tensor, first: int, count: int, num_rows: Tensor, loads: Tensor) -> Tensor:
    """See `kernels.linear.moe.own_experts`."""
    assert ids.is_contiguous() and ids.dtype == torch.int32
    here = torch.empty_like(ids)
    block = 256
    _own_kernel[(triton.cdiv(ids.numel(), block),)](
        ids,
        here,
        num_rows,
        loads,
        ids.numel(),
        ids.shape[0] // num_rows.shape[0],
        first,
        count,
        TOP_K=ids.shape[1],
        BLOCK=block,
        num_warps=2,
    )
    return here


hash_functions(globals())
