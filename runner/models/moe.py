"""Routed experts of a mixture-of-experts layer, as stacked tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...kernels.linear.moe import run_experts
from .layers import CheckpointSlot, WeightFormat, tensor_slot


class Experts(nn.Module):
    """All routed experts of a layer.

    A checkpoint stores them as matrices `<expert>.gate_proj.weight`, `<expert>.up_proj.weight` and
    `<expert>.down_proj.weight`, or, if `stacked`, in the form of the tensors here.
    """

    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        fmt: WeightFormat,
        activation: str = "silu",
        stacked: bool = False,
    ) -> None:
        super().__init__()
        self.activation, self.stacked = activation, stacked
        empty = functools.partial(torch.empty, dtype=fmt.dtype, device=fmt.device)
        self.register_buffer("gate_up", empty(num_experts, 2 * intermediate, hidden))
        self.register_buffer("down", empty(num_experts, hidden, intermediate))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x: [T, H]; weights, ids: [T, k] from `kernels.linear.moe.select_experts` -> [T, H]."""
        return run_experts(x, self.gate_up, self.down, weights, ids, self.activation)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        path = f"{parent}{name}"
        if self.stacked:
            yield f"{path}.gate_up_proj", tensor_slot(self.gate_up)
            yield f"{path}.down_proj", tensor_slot(self.down)
            return
        num_experts, _, size = self.down.shape
        for expert in range(num_experts):
            yield f"{path}.{expert}.gate_proj.weight", tensor_slot(self.gate_up[expert, :size])
            yield f"{path}.{expert}.up_proj.weight", tensor_slot(self.gate_up[expert, size:])
            yield f"{path}.{expert}.down_proj.weight", tensor_slot(self.down[expert])
