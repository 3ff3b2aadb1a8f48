"""Experts whose matrices are quantised; `kernels.linear.moe` has the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import use_triton
from ..linear.experts import PackedExperts, whole
from ..linear.moe import run_experts_reference
from ..quant.tiled import TiledWeight


def packed_experts(
    x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor, absent: bool = False
) -> Tensor:
    """See `kernels.linear.moe.run_experts`."""
    parts = packed_expert_parts(x, experts, weights, ids, absent=absent)
    return whole(parts, x)


def packed_expert_parts(
    x: Tensor,
    experts: PackedExperts,
    weights: Tensor,
    ids: Tensor,
    spare: int = 0,
    absent: bool = False,
) -> Tensor:
    """See `kernels.linear.moe.expert_parts`, and `run_experts` for `absent`."""
    if not _has_kernels(x, experts):
        return run_experts_reference(x, experts, weights, ids)
    from .triton import packed_experts as kernels

    parts = _hopper_parts(x, experts, weights, ids, spare, absent)
    if parts is None:
        parts = kernels.expert_parts(x, experts, weights, ids, spare, absent)
    return parts


def _hopper_parts(
    x: Tensor,
    experts: PackedExperts,
    weights: Tensor,
    ids: Tensor,
    spare: int = 0,
    absent: bool = False,
) -> Tensor | None:
    """The parts by the kernels of `hopper_experts`, if they can compute them."""
    weight = experts.gate_up
    if x.is_cpu or not isinstance(weight, TiledWeight) or not weight.narrow:
        return None
    from .grouped.triton import hopper_experts

    if not hopper_experts.fits(x, experts):
        return None
    parts: Tensor = hopper_experts.expert_parts(x, experts, weights, ids, spare, absent)
    return parts


def _has_kernels(x: Tensor, experts: PackedExperts) -> bool:
    """Whether the kernels take x, as in `packed.linear`: in 16 bits."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.shape[0] or not use_triton(x):
        return False
    return isinstance(experts.gate_up, TiledWeight) and isinstance(experts.down, TiledWeight)
