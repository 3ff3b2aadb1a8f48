"""Experts whose matrices are quantised; `kernels.linear.moe` has the others."""

from __future__ import annotations

from torch import Tensor

from ..device import use_triton
from ..linear.experts import PackedExperts
from ..linear.moe import run_experts_reference
from ..quant.tiled import TiledWeight


def packed_expert_parts(
    x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor, spare: int = 0
) -> Tensor:
    """See `kernels.linear.moe.expert_parts`."""
    if use_triton(x) and x.shape[0] and isinstance(experts.gate_up, TiledWeight):
        from .triton import packed_experts

        parts: Tensor = packed_experts.expert_parts(x, experts, weights, ids, spare)
        return parts
    return run_experts_reference(x, experts.widened(x.dtype), weights, ids)
