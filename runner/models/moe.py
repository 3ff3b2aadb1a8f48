"""Mixture-of-experts layers: a router, routed experts as stacked tensors, and a shared expert."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.cpu.experts import NativeExperts
from ...kernels.linear.experts import ExpertWeights, PackedExperts, Routing
from ...kernels.linear.linear import linear_parts
from ...kernels.linear.linear_choice import Skinny
from ...kernels.linear.moe import (
    add_experts,
    expert_parts,
    normed_scores,
    run_experts,
    run_experts_reference,
    select_experts,
)
from ...kernels.packed.experts import packed_expert_parts, packed_experts
from ..errors import ModelLoadError
from ..parallel.ranks import Cut, stacked
from .formats.expert_stack import ExpertStack, choose_form, experts_of
from .layers import CheckpointSlot, RMSNorm, WeightFormat, tensor_slot
from .llama import FeedForward


class DividedExperts(nn.Module):
    """The routed experts of a layer. Each rank holds whole ones, or a part of each.

    A subclass makes the weights of `count` experts with `size` inner features.
    """

    expert_share: float = 1.0  # the share of the experts that a token chooses

    def __init__(self, num_experts: int, intermediate: int, fmt: WeightFormat) -> None:
        """Each rank holds a share of the `intermediate` features of every expert, or `by_expert`
        some whole experts. If engines share the experts, it always holds whole ones.

        Raises ModelLoadError if the experts or features cannot be divided.
        """
        super().__init__()
        self.ranks, self.intermediate, self.total = fmt.ranks, intermediate, num_experts
        self.shared, self.fixed, self.format = fmt.experts, fmt.batch_invariant, fmt
        self.share: Cut | None = None  # of the features
        self.own: Cut | None = None  # of the experts
        self.loads: Tensor | None = None  # [1 + own experts] int64: rows of others, and of each
        if fmt.experts is not None:
            self.own = fmt.experts.share(num_experts)
            self.loads = torch.zeros(1 + self.own.size, dtype=torch.int64, device=fmt.device)
        elif fmt.ranks is not None and fmt.ranks.by_expert:
            self.own = fmt.ranks.share(num_experts, "experts")
        elif fmt.ranks is not None:
            self.share = fmt.ranks.share(intermediate, "intermediate features of an expert")
        self.count = num_experts if self.own is None else self.own.size
        self.size = intermediate if self.share is None else self.share.size

    @property
    def weights(self) -> ExpertWeights | PackedExperts | NativeExperts:
        """The weights of the experts here, in the form that they arrived in."""
        raise NotImplementedError

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x: [T, H]; weights, ids: [T, k] from `kernels.linear.moe.select_experts` -> [T, H].

        With several ranks, this is one rank's part of the sum; see `sum`.
        """
        if self.own is None:
            return self._run(x, weights, ids, absent=False)
        if self.shared is not None:
            assert self.loads is not None
            run = functools.partial(self._run, absent=True)
            return self.shared.run(x, weights, ids, self.own, self.loads, run)
        here = ids - self.own.start
        here = here.masked_fill((here < 0) | (here >= self.own.size), -1)
        return self._run(x, weights, here, absent=True)

    def _run(self, x: Tensor, weights: Tensor, ids: Tensor, absent: bool) -> Tensor:
        """Run `forward` for indices of the experts here. If `absent`, ids may be -1: no expert."""
        experts = self.weights
        if isinstance(experts, PackedExperts):
            return packed_experts(x, experts, weights, ids, absent)
        if isinstance(experts, NativeExperts):
            return run_experts_reference(x, experts, weights, ids)
        return run_experts(x, experts, weights, ids, absent, self.fixed and not absent)

    def sum(self, out: Tensor) -> Tensor:
        """The sum of `out` [T, H] over the ranks."""
        return out if self.ranks is None else self.ranks.sum(out)

    def matrix_slots(
        self,
        path: str,
        gate_up: ExpertStack,
        down: ExpertStack,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> Iterator[tuple[str, CheckpointSlot]]:
        """Yield a checkpoint slot for each matrix of each expert.

        The slots of experts that other ranks hold read nothing.
        """
        size, hidden = self.size, down.rows
        rows = ((gate_up, 0, size), (gate_up, size, size), (down, 0, hidden))
        first = 0 if self.own is None else self.own.start
        for expert in range(self.total):
            here = expert - first
            is_own = 0 <= here < self.count
            for part, (stack, start, num_rows) in zip(names, rows, strict=True):
                slot = stack.slot(here if is_own else 0, start, num_rows)
                if not is_own:
                    slot = replace(slot, load=lambda weight: None, cut=Cut(0, 0, 0))
                elif self.share is not None:
                    cut = replace(self.share, dim=int(stack is down))
                    shape = [*slot.shape]
                    shape[cut.dim] = self.intermediate
                    slot = replace(slot, shape=tuple(shape), cut=cut)
                yield f"{path}.{expert}.{part}.weight", slot

    def parts(self, x: Tensor, weights: Tensor, ids: Tensor, spare: int = 0) -> Tensor:
        """`forward`, or its parts; see `kernels.linear.moe.expert_parts`."""
        if not self.is_whole or self.fixed:
            return self.forward(x, weights, ids)
        experts = self.weights
        if isinstance(experts, PackedExperts):
            return packed_expert_parts(x, experts, weights, ids, spare)
        if isinstance(experts, NativeExperts):
            return run_experts_reference(x, experts, weights, ids)
        return expert_parts(x, experts, weights, ids, spare)

    @property
    def is_whole(self) -> bool:
        return self.ranks is None and self.shared is None

    def adds(self, num_rows: int) -> bool:
        """True if `add` can run `num_rows` rows: a single one, and whole experts as numbers."""
        whole = self.is_whole and not self.fixed
        return num_rows == 1 and whole and isinstance(self.weights, ExpertWeights)

    def add(self, x: Tensor, residual: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """residual + forward(x), both [1, H]; see `adds`."""
        own = self.weights
        assert isinstance(own, ExpertWeights)
        return add_experts(x, own, weights, ids, residual)


class Experts(DividedExperts):
    """All routed experts of a layer.

    A checkpoint stores them as tensors [E, 2I, H] and [E, H, I], or as matrices
    `<expert>.gate_proj.weight`, `<expert>.up_proj.weight` and `<expert>.down_proj.weight`, which
    may be quantised.
    """

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
        """`limit`: as in `ExpertWeights`; `names`: those of an expert's matrices."""
        super().__init__(num_experts, intermediate, fmt)
        self.activation, self.limit, self.names = activation, limit, names
        self.gate_up = ExpertStack(self.count, 2 * self.size, hidden, fmt)
        self.down = ExpertStack(self.count, hidden, self.size, fmt)
        choose_form(self.gate_up, self.down, activation)

    @property
    def weights(self) -> ExpertWeights | PackedExperts | NativeExperts:
        rule = {"activation": self.activation, "limit": self.limit}
        return experts_of(self.gate_up, self.down, **rule)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        path = f"{parent}{name}"
        matrices = self.matrix_slots(path, self.gate_up, self.down, self.names)
        forms = [(self._stacked(path), "stacked"), (matrices, "matrices")]
        if self.format.packed:  # random weights have the first form
            forms.reverse()
        for slots, form in forms:
            for stored, slot in slots:
                yield stored, replace(slot, form=(path, form))

    def _stacked(self, path: str) -> Iterator[tuple[str, CheckpointSlot]]:
        """The slots of tensors that hold a matrix of every expert."""
        for part, stack in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            slot = stack.whole_slot()
            shape, cut = [*slot.shape], self.own
            if self.own is not None:
                shape[0] = self.total
            elif self.share is not None and stack is self.down:
                shape[2], cut = self.intermediate, replace(self.share, dim=2)
            elif self.share is not None:
                shape[1] = 2 * self.intermediate
                cut = stacked([(self.intermediate, self.share)] * 2, dim=1)
            yield f"{path}.{part}", replace(slot, shape=tuple(shape), cut=cut)


# The few outputs of a router fill a GPU only if many programs share the sums of each.
_FEW_ROWS = Skinny(64, 128, 3, 4, split_k=16, block_m=16)
_MANY_ROWS = Skinny(64, 128, 3, 4, split_k=8, block_m=64)
_NORMED_ROWS = 16  # more rows would read the router's weights too often, see `normed_scores`
Chosen = tuple[Tensor, Tensor]  # the weights [M, k] float32 and ids [M, k] of each row's experts


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
        check_top_k(routing.top_k, num_experts)
        _check_groups(routing, num_experts)
        self.routing = routing
        # Kernels that return float32 sums need no float32 weights.
        self.in_parts, self.fixed = fmt.linear is not None, fmt.batch_invariant
        dtype = fmt.dtype if self.in_parts else torch.float32
        empty = functools.partial(torch.empty, dtype=dtype, device=fmt.device)
        self.register_buffer("weight", empty(num_experts, hidden))
        self.register_buffer("bias", empty(num_experts) if bias else None)
        own = torch.empty(num_experts, device=fmt.device) if correction else None
        self.register_buffer("e_score_correction_bias", own)

    def forward(self, hidden: Tensor) -> Chosen:
        """hidden: [M, H] -> the choice of each row's experts."""
        return select_experts(self.logits(hidden), self.routing, self.e_score_correction_bias)

    def norms(self, hidden: Tensor) -> bool:
        """True if `after` can norm `hidden` [M, H] or its parts [S, M, H]: few rows on a GPU."""
        few = hidden.shape[-2] <= _NORMED_ROWS and self.in_parts and not self.fixed
        return few and hidden.is_contiguous()

    def after(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Chosen]:
        """Norm the stream hidden + residual and choose experts: (normed rows, stream, choice)."""
        args = (norm.inside, self.weight, self.bias)
        normed, stream, scores = normed_scores(hidden, residual, *args)
        return normed, stream, select_experts(scores, self.routing, self.e_score_correction_bias)

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


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise ModelLoadError unless a token can have this number of different experts."""
    if not 0 < top_k <= num_experts:
        raise ModelLoadError(
            f"each token has {top_k} experts of {num_experts}, but it must have at least one and "
            "at most all."
        )


def _check_groups(routing: Routing, num_experts: int) -> None:
    """Raise ModelLoadError if the chosen groups of experts do not exist or have too few."""
    groups, chosen = routing.num_groups, routing.top_groups
    each = num_experts // max(groups, 1)
    fits = groups == 1 or (
        0 < chosen <= groups
        and each * groups == num_experts
        and each >= (2 if routing.group_score == "top2" else 1)
        and chosen * each >= routing.top_k
    )
    if groups < 1 or not fits:
        raise ModelLoadError(
            f"the router cannot choose {chosen} of {groups} groups and {routing.top_k} experts in "
            f"them: the model has {num_experts} experts; check n_group and topk_group."
        )


class RoutedMLP(FeedForward):
    @property
    def scorer(self) -> Router:
        raise NotImplementedError

    def feed(
        self, norm: RMSNorm, hidden: Tensor, residual: Tensor | None, fuses: bool
    ) -> tuple[Tensor, Tensor | None]:
        router = self.scorer
        if fuses and router.norms(hidden):
            x, stream, chosen = router.after(norm, hidden, residual)
        else:
            x, stream = norm.add(hidden, residual)
            chosen = router.forward(x)
        return self.routed(x, stream, chosen, fuses)

    def routed(
        self, x: Tensor, stream: Tensor, chosen: Chosen, fuses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`feed` for normed rows x [M, H] whose experts are `chosen`."""
        raise NotImplementedError
