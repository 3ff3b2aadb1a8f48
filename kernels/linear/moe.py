"""Mixture of experts: chooses the experts of each token and runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import use_triton
from ..operation import operation
from .experts import Experts, ExpertWeights, Routing
from .linear import Norm
from .norm_rope import fused_add_rms_norm_reference, rms_norm_reference


def select_experts_reference(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    listed: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts from router logits: (weights [T, k] float32, ids [T, k] int32 or int64).

    logits: [T, E] float32, or S parts [S, T, E] whose sum they are. `bias` [E] affects which
    experts are chosen, but not their weights. `listed`, if given, are token ids [T] and a table
    [V, k] of the experts that they have whatever the scores. No branch depends on data, so a graph
    may hold this. A renormalised softmax equals a softmax over the chosen logits alone. A GPU
    chooses the first of equal experts.
    """
    if logits.dim() == 3:  # one after the other: the order of torch's sum depends on T
        logits = functools.reduce(torch.add, logits)
    scores = _SCORES[routing.scoring](logits)
    if listed is None:
        ids = _best_experts(scores if bias is None else scores + bias, routing)
    else:
        ids = listed[1].index_select(0, listed[0])
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids


select_experts = operation(select_experts_reference, "logits", ".triton.route")


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def _best_experts(choice: Tensor, routing: Routing) -> Tensor:
    """The ids [T, k] of the experts with the highest `choice` [T, E], in the allowed groups."""
    if routing.num_groups > 1:
        grouped = choice.view(choice.shape[0], routing.num_groups, -1)  # [T, groups, E / groups]
        best = grouped.topk(2 if routing.group_score == "top2" else 1, dim=-1)[0].sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.topk(routing.top_groups, dim=-1)[1], True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    return choice.topk(routing.top_k, dim=-1)[1]


def normed_scores_reference(
    x: Tensor, residual: Tensor | None, norm: Norm, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A norm and the router behind it, for few rows: (normed rows, stream, scores).

    x: [M, H], or float32 parts [S, M, H] of it if there is a `residual` [M, H]; weight: [E, H];
    bias: [E]. The stream [M, H] is x + residual, scores are [M, E] float32.
    """
    if residual is None:
        normed, stream = rms_norm_reference(x, *norm), x
    else:
        normed, stream = fused_add_rms_norm_reference(x, residual, *norm)
    scores = F.linear(normed.float(), weight.float(), None if bias is None else bias.float())
    return normed, stream, scores


normed_scores = operation(normed_scores_reference, "x", ".triton.normed_scores")


def run_experts(
    x: Tensor,
    experts: ExpertWeights,
    weights: Tensor,
    ids: Tensor,
    absent: bool = False,
    fixed: bool = False,
) -> Tensor:
    """Compute the weighted sum of each token's experts, [T, H].

    x: [T, H]; weights: [T, k] fp32; ids: [T, k] int32 or int64, different in each row. If experts
    may be `absent`, ids of -1 stand for experts that are left out of the sum. If `fixed`, a row's
    bits do not depend on the other rows; not for absent experts.
    """
    if use_triton(x):
        from .triton import moe as triton_moe

        out: Tensor
        if fixed:
            assert not absent
            out = triton_moe.run_experts_fixed(x, experts, weights, ids)
        else:
            out = triton_moe.run_experts(x, experts, weights, ids, absent)
        return out
    return run_experts_reference(x, experts, weights, ids)


def add_experts_reference(
    x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor, residual: Tensor
) -> Tensor:
    """`run_experts` of one row plus `residual`, all [1, H]."""
    return residual + run_experts_reference(x, experts, weights, ids)


add_experts = operation(add_experts_reference, "x", ".triton.moe")


def own_experts_reference(
    ids: Tensor, first: int, count: int, num_rows: Tensor, loads: Tensor
) -> Tensor:
    """Keep the ids of the `count` experts from `first` on, as indices from 0; others become -1.

    ids: [D * R, k] int32, blocks of R rows, of which the first `num_rows` [D] int32 are real; the
    others get -1 too. Adds the numbers of real pairs to `loads` [1 + count] int64: those of experts
    elsewhere, then those of each expert. No branch depends on data, so a graph may hold this.
    """
    size = ids.shape[0] // num_rows.shape[0]
    place = torch.arange(size, device=ids.device)
    real = (place < num_rows.unsqueeze(1)).view(-1, 1)  # [D * R, 1]
    here = ids - first
    own = (here >= 0) & (here < count) & real
    here = torch.where(own, here, -1)
    loads.scatter_add_(0, (here + 1).flatten().long(), real.long().expand(ids.shape).flatten())
    return here


own_experts = operation(own_experts_reference, "ids", ".triton.route")


def expert_parts(
    x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor, spare: int = 0
) -> Tensor:
    """`run_experts` for a next kernel that can sum parts.

    Returns [T, H], or float32 parts [S + spare, T, H], the last `spare` of which the caller must
    fill.
    """
    if use_triton(x) and x.shape[0]:
        from .triton import moe as triton_moe

        parts: Tensor = triton_moe.expert_parts(x, experts, weights, ids, spare)
        return parts
    return run_experts(x, experts, weights, ids)


def run_experts_reference(x: Tensor, experts: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    """The plain version of `run_experts`, for experts in any form: one pass for each that has
    tokens."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, pairs in pairs_by_expert(ids, experts.num_experts):
        tokens = pairs // ids.shape[1]
        part = experts.down_of(expert, gated(experts.gate_up_of(expert, x[tokens]), experts))
        out.index_add_(0, tokens, part.float() * weights.flatten()[pairs].unsqueeze(1))
    return out.to(x.dtype)


def pairs_by_expert(ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """The (token, choice) pairs of each expert that ids [T, k] choose, as indices into `ids`
    flattened, ascending. Ids below 0 are of no expert here. Waits for the device."""
    flat = ids.flatten()
    flat = flat.masked_fill(flat < 0, num_experts)  # after all others
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)[:num_experts].tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, order[start : start + count]
            start += count


def gated(gate_up: Tensor, experts: Experts) -> Tensor:
    """The activation of an expert: gate and up side by side, [T, 2I] -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if experts.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))
    if experts.activation == "limited_silu":
        return F.silu(gate.clamp(max=experts.limit)) * up.clamp(-experts.limit, experts.limit)
    if experts.activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up
