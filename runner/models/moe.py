"""Experts as stacked tensors, filled from a checkpoint's separate matrices."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...kernels.moe import run_experts
from ..layers import CheckpointSlot, WeightFormat


class Experts(nn.Module):
    """All routed experts of a layer; checkpoint names `<module>.<expert>.gate_proj.weight` etc."""

    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        fmt: WeightFormat,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.activation = activation
        empty = functools.partial(torch.empty, dtype=fmt.dtype, device=fmt.device)
        self.register_buffer("gate_up", empty(num_experts, 2 * intermediate, hidden))
        self.register_buffer("down", empty(num_experts, hidden, intermediate))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x: [T, H]; weights, ids: [T, k] as `kernels.moe.select_experts` gives them -> [T, H]."""
        return run_experts(x, self.gate_up, self.down, weights, ids, self.activation)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        num_experts, hidden, size = self.down.shape
        for expert in range(num_experts):
            path = f"{parent}{name}.{expert}"
            gate, up = self.gate_up[expert, :size], self.gate_up[expert, size:]
            for part, target in (("gate", gate), ("up", up), ("down", self.down[expert])):
                load = functools.partial(_fill, target)
                yield f"{path}.{part}_proj.weight", CheckpointSlot(tuple(target.shape), load)


def _fill(target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor)
