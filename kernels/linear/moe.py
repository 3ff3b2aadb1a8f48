"""Mixture of experts: chooses the experts of each token and runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import use_triton


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts."""

    top_k: int
    scoring: str = "softmax"  # or "sigmoid"
    num_groups: int = 1
    top_groups: int = 1  # experts come from this number of groups, those with the best scores
    group_score: str = (
        "max"  # a group's score: its best expert's, or "top2", the sum of its best two
    )
    renormalise: bool = False  # make the chosen weights sum to 1 before `scale` is applied
    scale: float = 1.0


def select_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts from router logits [T, E] float32: (weights [T, k] float32, ids [T, k] int64).

    `bias` [E] affects which experts are chosen, but not their weights. No branch depends on data,
    so a graph may hold this.
    """
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        grouped = choice.view(choice.shape[0], routing.num_groups, -1)  # [T, groups, E / groups]
        best = grouped.topk(2 if routing.group_score == "top2" else 1, dim=-1)[0].sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.topk(routing.top_groups, dim=-1)[1], True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.topk(routing.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids


def run_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Compute the weighted sum of each token's experts, [T, H].

    x: [T, H]; gate_up: [E, 2I, H]; down: [E, H, I]; weights: [T, k] fp32; ids: [T, k] int64;
    activation: "silu" or "gelu_tanh".
    """
    if use_triton(x):
        from .triton import moe as triton_moe

        out: Tensor = triton_moe.run_experts(x, gate_up, down, weights, ids, activation)
        return out
    return run_experts_reference(x, gate_up, down, weights, ids, activation)


def run_experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    """The plain version of `run_experts`: one pass per expert that has tokens."""
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)  # [T * k] (token, choice) pairs by expert
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        pairs = order[start : start + count]
        tokens = pairs // top_k
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        part = F.linear(gate * up, down[expert])
        out.index_add_(0, tokens, part.float() * weights.flatten()[pairs].unsqueeze(1))
        start += count
    return out.to(x.dtype)
