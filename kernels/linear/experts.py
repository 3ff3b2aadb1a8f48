"""The arguments of mixture-of-experts layers, shared by the references and the Triton versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quant.tiled import Weight

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu", "limited_silu")


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts."""

    top_k: int
    scoring: str = "softmax"  # or "sigmoid" or "sqrtsoftplus"
    num_groups: int = 1
    top_groups: int = 1  # experts come from this number of groups, those with the best scores
    group_score: str = (
        "max"  # a group's score: its best expert's, or "top2", the sum of its best two
    )
    renormalise: bool = False  # make the chosen weights sum to 1 before `scale` is applied
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertWeights:
    """The stacked weights of a layer's routed experts, and what they compute.

    An expert maps x to down (act(gate x + b) * (up x + b)) + b. "clamped_swiglu" (gpt-oss) is
    (up + 1) * gate * sigmoid(alpha * gate) with gate at most `limit` and up within ± `limit`.
    "limited_silu" (DeepSeek V4) is up * silu(gate) with the same limits.
    """

    gate_up: Tensor  # [E, 2I, H], the rows of gate first
    down: Tensor  # [E, H, I]
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, H]
    activation: str = "silu"  # one of ACTIVATIONS
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor:
        """Gate and up of rows x [n, H] for one expert: [n, 2I]."""
        return _product(x, self.gate_up[expert], self.gate_up_bias, expert)

    def down_of(self, expert: int, x: Tensor) -> Tensor:
        """The output of inner values x [n, I] for one expert: [n, H]."""
        return _product(x, self.down[expert], self.down_bias, expert)


@dataclass(frozen=True)
class PackedExperts:
    """`ExpertWeights` with quantised matrices, stacked along their rows."""

    gate_up: Weight  # [E * 2I, H], of each expert the rows of gate first
    down: Weight  # [E * H, I]
    num_experts: int
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, H]
    activation: str = "silu"  # one of ACTIVATIONS
    alpha: float = 1.702
    limit: float = 7.0

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor:
        """Gate and up of rows x [n, H] for one expert, which is widened for it: [n, 2I]."""
        return _product(x, self._matrix(self.gate_up, expert, x), self.gate_up_bias, expert)

    def down_of(self, expert: int, x: Tensor) -> Tensor:
        """The output of inner values x [n, I] for one expert: [n, H]."""
        return _product(x, self._matrix(self.down, expert, x), self.down_bias, expert)

    def _matrix(self, stack: Weight, expert: int, x: Tensor) -> Tensor:
        rows = stack.shape[0] // self.num_experts
        return stack.rows(
            torch.arange(expert * rows, (expert + 1) * rows, device=x.device), x.dtype
        )

    def widened(self, dtype: torch.dtype) -> ExpertWeights:
        """The same experts with all numbers in memory."""
        gate_up, down = (
            weight.dequantise(dtype).view(self.num_experts, -1, weight.shape[1])
            for weight in (self.gate_up, self.down)
        )
        rest = (self.activation, self.alpha, self.limit)
        gate_up_bias, down_bias = (
            None if bias is None else bias.to(dtype) for bias in (self.gate_up_bias, self.down_bias)
        )
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias, *rest)


class Experts(Protocol):
    """The experts of a layer in any form."""

    @property
    def num_experts(self) -> int: ...

    @property
    def activation(self) -> str: ...

    @property
    def alpha(self) -> float: ...

    @property
    def limit(self) -> float: ...

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor: ...

    def down_of(self, expert: int, x: Tensor) -> Tensor: ...


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return F.linear(x, matrix, None if bias is None else bias[expert].to(x.dtype))


def whole(parts: Tensor, x: Tensor) -> Tensor:
    """The sum of parts [S, T, H] in the dtype of x; a whole [T, H] as it is."""
    return parts if parts.dim() == 2 else parts.sum(0, dtype=torch.float32).to(x.dtype)
