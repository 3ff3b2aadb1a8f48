"""Routed experts whose matrices the native kernels multiply in the formats of their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .matrix import Matrix


@dataclass(frozen=True)
class NativeExperts:
    """A layer's experts; see `kernels.linear.experts.Experts`."""

    gate_up: Sequence[Matrix]  # [2I, H] of each expert
    down: Sequence[Matrix]  # [H, I]
    gate_up_bias: Tensor | None = None  # [E, 2I]
    down_bias: Tensor | None = None  # [E, H]
    activation: str = "silu"  # as in `kernels.linear.experts`, like the other two
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def num_experts(self) -> int:
        return len(self.down)

    def gate_up_of(self, expert: int, x: Tensor) -> Tensor:
        """Gate and up of rows x [n, H] fp32 for one expert: [n, 2I]."""
        return _biased(self.gate_up[expert].multiply(x), self.gate_up_bias, expert)

    def down_of(self, expert: int, x: Tensor) -> Tensor:
        """The output of inner values x [n, I] fp32 for one expert: [n, H]."""
        return _biased(self.down[expert].multiply(x), self.down_bias, expert)


def _biased(out: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return out if bias is None else out.add_(bias[expert])
