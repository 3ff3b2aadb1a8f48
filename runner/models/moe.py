"""Mixture-of-experts layers: a router, routed experts as stacked tensors, and a shared expert."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.linear.experts import ExpertWeights, Routing
from ...kernels.linear.linear import Norm, linear_parts
from ...kernels.linear.linear_choice import Skinny
from ...kernels.linear.moe import expert_parts, run_experts, select_experts
from ..errors import ModelLoadError
from ..parallel.ranks import Cut, stacked
from .layers import CheckpointSlot, Linear, WeightFormat, tensor_slot
from .llama import MLP


class Experts(nn.Module):
    """All routed experts of a layer.

    A checkpoint stores them in the form of the tensors here, or as matrices
    `<expert>.gate_proj.weight`, `<expert>.up_proj.weight` and `<expert>.down_proj.weight`.
    """

    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]
    expert_share: float = 1.0  # the share of the experts that a token chooses

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        fmt: WeightFormat,
        activation: str = "silu",
        limit: float = 7.0,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """`limit`: as in `ExpertWeights`; `names`: those of an expert's matrices.

        Each rank holds a share of the `intermediate` features of every expert, or `by_expert`
        some whole experts.
        """
        super().__init__()
        self.ranks, self.intermediate, self.total = fmt.ranks, intermediate, num_experts
        self.share: Cut | None = None  # of the features
        self.own: Cut | None = None  # of the experts
        if fmt.ranks is not None and fmt.ranks.by_expert:
            self.own = fmt.ranks.share(num_experts, "experts")
            num_experts = self.own.size
        elif fmt.ranks is not None:
            self.share = fmt.ranks.share(intermediate, "intermediate features of an expert")
            intermediate = self.share.size
        self.activation, self.limit, self.names = activation, limit, names
        self.fixed = fmt.batch_invariant
        empty = functools.partial(torch.empty, dtype=fmt.dtype, device=fmt.device)
        self.register_buffer("gate_up", empty(num_experts, 2 * intermediate, hidden))
        self.register_buffer("down", empty(num_experts, hidden, intermediate))

    @property
    def weights(self) -> ExpertWeights:
        """The stacked weights."""
        return ExpertWeights(self.gate_up, self.down, activation=self.activation, limit=self.limit)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x: [T, H]; weights, ids: [T, k] from `kernels.linear.moe.select_experts` -> [T, H].

        With several ranks, this is one rank's part of the sum; see `sum`.
        """
        if self.own is None:
            return run_experts(x, self.weights, weights, ids, fixed=self.fixed)
        here = ids - self.own.start
        here = here.masked_fill((here < 0) | (here >= self.own.size), -1)
        return run_experts(x, self.weights, weights, here, absent=True)

    def sum(self, out: Tensor) -> Tensor:
        """The sum of `out` [T, H] over the ranks."""
        return out if self.ranks is None else self.ranks.sum(out)

    def parts(self, x: Tensor, weights: Tensor, ids: Tensor, spare: int = 0) -> Tensor:
        """`forward`, or its parts; see `kernels.linear.moe.expert_parts`."""
        if self.ranks is not None or self.fixed:
            return self.forward(x, weights, ids)
        return expert_parts(x, self.weights, weights, ids, spare)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        path = f"{parent}{name}"
        for part, target in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            slot = tensor_slot(target, form=(path, "stacked"))
            if self.own is not None:
                slot = replace(slot, shape=(self.total, *slot.shape[1:]), cut=self.own)
            yield f"{path}.{part}", slot if self.share is None else self._stacked(slot, part)
        if self.own is not None:
            yield from self._whole_experts(path, self.own)
            return
        num_experts, _, size = self.down.shape
        for expert in range(num_experts):
            parts = (self.gate_up[expert, :size], self.gate_up[expert, size:], self.down[expert])
            for part, target in zip(self.names, parts, strict=True):
                slot = tensor_slot(target, form=(path, "matrices"))
                if self.share is not None:
                    slot = self._matrix(slot, part == self.names[2])
                yield f"{path}.{expert}.{part}.weight", slot

    def _whole_experts(self, path: str, own: Cut) -> Iterator[tuple[str, CheckpointSlot]]:
        """The slots of all experts' matrices; of those of other ranks, nothing is read."""
        size = self.down.shape[2]
        for expert in range(self.total):
            here = expert - own.start
            local = here if 0 <= here < own.size else 0
            parts = (self.gate_up[local, :size], self.gate_up[local, size:], self.down[local])
            for part, target in zip(self.names, parts, strict=True):
                slot = tensor_slot(target, form=(path, "matrices"))
                if local != here:
                    slot = replace(slot, load=_skip, cut=Cut(0, 0, 0))
                yield f"{path}.{expert}.{part}.weight", slot

    def _matrix(self, slot: CheckpointSlot, is_down: bool) -> CheckpointSlot:
        """The slot of this rank's part of an expert's matrix."""
        assert self.share is not None
        cut = replace(self.share, dim=int(is_down))
        shape = [*slot.shape]
        shape[cut.dim] = self.intermediate
        return replace(slot, shape=tuple(shape), cut=cut)

    def _stacked(self, slot: CheckpointSlot, part: str) -> CheckpointSlot:
        """The slot of this rank's part of a stack of matrices."""
        assert self.share is not None
        count, rows, columns = slot.shape
        if part == "down_proj":
            return replace(
                slot, shape=(count, rows, self.intermediate), cut=replace(self.share, dim=2)
            )
        cut = stacked([(self.intermediate, self.share)] * 2, dim=1)
        return replace(slot, shape=(count, 2 * self.intermediate, columns), cut=cut)


def _skip(tensor: Tensor) -> None:
    pass


# The few outputs of a router fill a GPU only if many programs share the sums of each.
_FEW_ROWS = Skinny(64, 128, 3, 4, split_k=16, block_m=16)
_MANY_ROWS = Skinny(64, 128, 3, 4, split_k=8, block_m=64)


def router_parts(hidden: Tensor, weight: Tensor, bias: Tensor | None, fixed: bool) -> Tensor:
    """Float32 parts [S, M, E] of the scores of E experts. If `fixed`, S does not depend on M.

    hidden: [M, H]; weight: [E, H]; bias: [E].
    """
    few = hidden.shape[0] <= _FEW_ROWS.block_m and not fixed
    return linear_parts(hidden, weight, bias, _FEW_ROWS if few else _MANY_ROWS)


class Router(nn.Module):
    """Scores the experts in fp32 and selects some for each token."""

    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E], part of the scores
    # [E], added to the scores for the choice alone
    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        routing: Routing,
        fmt: WeightFormat,
        bias: bool = False,
        correction: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < routing.top_k <= num_experts:
            raise ModelLoadError(
                f"each token has {routing.top_k} experts of {num_experts}, but it must have at "
                "least one and at most all."
            )
        self.routing = routing
        # Kernels that return float32 sums need no float32 weights.
        self.in_parts, self.fixed = fmt.linear is not None, fmt.batch_invariant
        dtype = fmt.dtype if self.in_parts else torch.float32
        empty = functools.partial(torch.empty, dtype=dtype, device=fmt.device)
        self.register_buffer("weight", empty(num_experts, hidden))
        self.register_buffer("bias", empty(num_experts) if bias else None)
        own = torch.empty(num_experts, device=fmt.device) if correction else None
        self.register_buffer("e_score_correction_bias", own)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden: [M, H] -> (weights [M, k] fp32, ids [M, k])."""
        return select_experts(self.logits(hidden), self.routing, self.e_score_correction_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of all experts in fp32: [M, E], or parts [S, M, E]."""
        if not self.in_parts:
            return F.linear(hidden.float(), self.weight, self.bias)
        return router_parts(hidden, self.weight, self.bias, self.fixed)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.weight", tensor_slot(self.weight)
        if self.bias is not None:
            yield f"{parent}{name}.bias", tensor_slot(self.bias, "zeros")
        if (own := self.e_score_correction_bias) is not None:
            yield f"{parent}{name}.e_score_correction_bias", tensor_slot(own, "zeros")


class SparseMLP(nn.Module):
    """A feed-forward layer of routed experts and, if the config has one, a shared expert.

    The shared expert's output is multiplied by the sigmoid of a gate. Config names are those of
    Qwen2-MoE, Qwen3-MoE, Qwen3-Next and Qwen3.5.
    """

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.moe_intermediate_size
        renormalise = bool(getattr(config, "norm_topk_prob", True))  # Qwen3.5 always does
        routing = Routing(config.num_experts_per_tok, renormalise=renormalise)
        self.gate = Router(hidden, config.num_experts, routing, fmt)
        self.experts = Experts(config.num_experts, hidden, size, fmt)
        self.experts.expert_share = routing.top_k / config.num_experts
        shared = getattr(config, "shared_expert_intermediate_size", 0)
        self.has_shared = bool(shared)
        if shared:
            self.shared_expert = MLP(hidden, shared, fmt, bias=False, sums=False)
            self.shared_expert_gate = Linear(hidden, 1, fmt)

    def parts(
        self, hidden: Tensor, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """hidden: [M, H] -> [M, H], or partial sums [S, M, H], which the next norm adds up.

        `norms` and `adds` say that it gets neither norm nor residual.
        """
        assert norm is None and residual is None
        out = self.experts.parts(hidden, *self.gate.forward(hidden), spare=int(self.has_shared))
        if not self.has_shared:
            return self.experts.sum(out)
        gate = torch.sigmoid(self.shared_expert_gate.forward(hidden))
        shared = self.shared_expert.forward(hidden)
        if out.dim() == 2:
            return self.experts.sum(torch.addcmul(out, gate, shared))
        torch.mul(shared, gate, out=out[-1])
        return out

    def norms(self, num_rows: int) -> bool:
        """As `MLP.norms`: never, since router and experts read the same normed rows."""
        return False

    def adds(self, num_rows: int) -> bool:
        """As `MLP.adds`: never."""
        return False
