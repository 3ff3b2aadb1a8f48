"""gpt-oss: attention with sinks and alternating sliding windows, and biased clamped experts.

Checkpoints store the experts as MXFP4 (blocks of 32 numbers of 4 bits with a common power of two),
or as stacked matrices [in, out]. MXFP4 stays so in memory where kernels read it, and is widened
elsewhere. GGUF files have a matrix for each of gate, up and down of an expert, and their biases
apart.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....kernels.cpu.experts import NativeExperts
from ....kernels.linear.experts import ExpertWeights, PackedExperts, Routing
from ....kernels.quant.packed import PackedWeight
from ....kernels.quant.part import columns_of
from ...errors import ModelLoadError
from ...parallel.ranks import Cut
from ..formats.expert_stack import ExpertStack, choose_form, experts_of
from ..layers import CheckpointSlot, WeightFormat, tensor_slot
from ..llama import Attention, DecoderLayer, FeedForward, LlamaModel
from ..moe import Chosen, DividedExperts, RoutedMLP, Router
from ..sharded import split_tensor

_ACTIVATION = "clamped_swiglu"
_GROUP = 32  # numbers that share a scale
_SPAN = 256  # columns of a span of words, see `kernels.quant.tiled`
_RANDOM_SCALE = 120  # of random weights: 2 ** -7


class SinkAttention(Attention):
    """Attention in which each query head also attends to a learned logit without a value."""

    sinks: Tensor  # [Hq]

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__(config, index, layer_id, fmt)
        self.ranks = fmt.ranks
        empty = torch.empty(self.num_heads, dtype=torch.float32, device=fmt.device)
        self.register_buffer("sinks", empty)
        self.layer = replace(self.layer, sinks=self.sinks)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        heads = self.sinks.shape[0]
        if self.ranks is None:
            yield f"{parent}{name}.sinks", tensor_slot(self.sinks)
        else:
            total = heads * self.ranks.size
            yield (
                f"{parent}{name}.sinks",
                split_tensor(self.sinks, total, self.ranks.share(total, "heads")),
            )


class GptOssExperts(DividedExperts):
    """All experts of a layer. Checkpoints alternate the rows of gate and up."""

    gate_up_bias: Tensor  # [E, 2I], the rows of gate first
    down_bias: Tensor  # [E, H]

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        count, hidden, size = config.num_local_experts, config.hidden_size, config.intermediate_size
        if hidden % _GROUP or size % _GROUP:
            raise ModelLoadError(
                f"hidden_size {hidden} and intermediate_size {size} must be multiples of {_GROUP}."
            )
        super().__init__(count, size, fmt)
        self.features = self.share or Cut(0, 0, size)  # of an expert, on this rank
        self.gate_up = ExpertStack(self.count, 2 * self.size, hidden, fmt)
        self.down = ExpertStack(self.count, hidden, self.size, fmt)
        choose_form(self.gate_up, self.down, _ACTIVATION)
        for name, stack in (("gate_up", self.gate_up), ("down", self.down)):
            bias = torch.empty(self.count, stack.rows, dtype=fmt.dtype, device=fmt.device)
            self.register_buffer(f"{name}_bias", bias)
            stack.expected_bytes = _bytes_of(stack)
        self.expert_share = config.num_experts_per_tok / count
        self.alpha = float(getattr(config, "swiglu_alpha", 1.702))
        self.limit = float(getattr(config, "swiglu_limit", 7.0))

    @property
    def weights(self) -> ExpertWeights | PackedExperts | NativeExperts:
        rule = {"activation": _ACTIVATION, "alpha": self.alpha, "limit": self.limit}
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return experts_of(self.gate_up, self.down, **biases, **rule)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        """The slots of all experts; of those of other ranks, nothing is read."""
        path, hidden, whole = f"{parent}{name}", self.down.rows, self.intermediate
        for part, stack, shape in (
            ("gate_up", self.gate_up, (self.total, 2 * whole, hidden)),
            ("down", self.down, (self.total, hidden, whole)),
        ):
            bias = getattr(self, f"{part}_bias")
            fill: Callable[[Tensor], None] = functools.partial(self._fill_bias, bias)
            if stack is self.down and self.share is not None and self.share.start > 0:
                fill = functools.partial(_fill_zeros, bias)  # the sum over ranks holds it once
            form = (f"{path}.bias", "joined") if stack is self.gate_up else None
            yield f"{path}.{part}_proj_bias", self._slot(shape[:2], fill, form, "zeros")
            load = functools.partial(self._take_matrices, stack)
            matrices = (shape[0], shape[2], shape[1])
            pair = _BlocksAndScales(functools.partial(self._take_blocks, stack))
            grid, kind = (*shape[:2], shape[2] // _GROUP), (path, "mxfp4")
            slots = {
                "": self._slot(matrices, load, (path, "matrices")),
                "_blocks": self._slot((*grid, _GROUP // 2), pair.take_blocks, kind),
                "_scales": self._slot(grid, pair.take_scales, kind),
            }
            # Random weights have the first form.
            for end in reversed(slots) if self.format.packed else slots:
                yield f"{path}.{part}_proj{end}", slots[end]
        for start, part in ((0, "gate"), (self.size, "up")):
            fill = functools.partial(self._fill_half, start)
            slot = self._slot((self.total, whole), fill, (f"{path}.bias", "apart"), "zeros")
            yield f"{path}.{part}_proj_bias", slot
        for stored, slot in self.matrix_slots(path, self.gate_up, self.down):
            yield stored, replace(slot, form=(path, "apart"))

    def _slot(
        self,
        shape: tuple[int, ...],  # of the tensors of all experts
        load: Callable[[Tensor], None],
        form: tuple[str, str] | None = None,
        init: str = "normal",
    ) -> CheckpointSlot:
        return CheckpointSlot(shape, load, init, form=form, cut=self.own)

    def _fill_bias(self, target: Tensor, stored: Tensor) -> None:
        own = stored if target is self.down_bias else _halves(stored, self.features, dim=1)
        target.copy_(own)

    def _fill_half(self, start: int, stored: Tensor) -> None:
        """Take the biases [E, I] of gates or ups, whose own rows begin at `start`."""
        own = stored[:, self.features.start : self.features.stop]
        self.gate_up_bias[:, start : start + self.size].copy_(own)

    def _take_matrices(self, stack: ExpertStack, stored: Tensor) -> None:
        """Take the matrices [E, C, R] of the experts here, or this rank's part of them."""
        matrices = stored.transpose(1, 2)
        if stack is self.gate_up:
            stack.take_all(_halves(matrices, self.features, dim=1))
        else:
            stack.take_all(matrices[..., self.features.start : self.features.stop])

    def _take_blocks(self, stack: ExpertStack, blocks: Tensor, scales: Tensor, expert: int) -> None:
        """Take the blocks [R, C / 32, 16] and scales [R, C / 32] of one expert here."""
        own_features = self.features
        if stack is self.gate_up:
            blocks, scales = (_halves(part, own_features, dim=0) for part in (blocks, scales))
        whole = PackedWeight("fp4", blocks.flatten(1), scales, scales.shape[1] * _GROUP, _GROUP)
        own: PackedWeight | Tensor | None = whole
        if stack is self.down and self.share is not None:
            own = columns_of(whole, own_features.start, own_features.stop)
            if own is None:  # a block is of features of two ranks
                own = whole.dequantise()[:, own_features.start : own_features.stop]
        assert own is not None
        stack.take(expert, 0, own)


def _bytes_of(stack: ExpertStack) -> int | None:
    """Bytes of a stack of MXFP4 if it will stay so."""
    some = torch.zeros(1, _GROUP // 2, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    if not stack.keeps(PackedWeight("fp4", *some, _GROUP, _GROUP)):
        return None
    groups = -(-stack.columns // _GROUP)
    span, factors = _SPAN, 0
    if stack.narrow:
        span, factors = 64, -(-groups // 8) * 8
    words = -(-stack.columns // span) * span // 2
    return stack.count * stack.rows * (words + groups + factors)


def _halves(stored: Tensor, share: Cut, dim: int) -> Tensor:
    """A rank's rows of gate, and below them those of up, of rows that alternate."""
    pairs, before = stored.narrow(dim, 2 * share.start, 2 * share.size), [slice(None)] * dim
    return torch.cat([pairs[(*before, slice(first, None, 2))] for first in (0, 1)], dim)


def _fill_zeros(target: Tensor, stored: Tensor) -> None:
    target.zero_()


class _BlocksAndScales:
    """Joins the two tensors of an MXFP4 stack, which may be loaded in any order.

    Random ones are floats; they become random codes and one small scale.
    """

    def __init__(self, fill: Callable[[Tensor, Tensor, int], None]) -> None:
        self._fill = fill
        self._lock = threading.Lock()
        self._waiting: dict[str, Tensor] = {}

    def take_blocks(self, blocks: Tensor) -> None:
        """blocks: [E, R, C / 32, 16] uint8."""
        self._take("blocks", blocks)

    def take_scales(self, scales: Tensor) -> None:
        """scales: [E, R, C / 32] uint8."""
        self._take("scales", scales)

    def _take(self, kind: str, tensor: Tensor) -> None:
        with self._lock:
            self._waiting[kind] = tensor
            if len(self._waiting) < 2:
                return
            blocks, scales = self._waiting.pop("blocks"), self._waiting.pop("scales")
        for expert in range(blocks.shape[0]):  # one at a time, so that copies stay small
            at = slice(expert, expert + 1)
            own, factors = blocks[at], scales[at]
            if own.is_floating_point():
                own = ((own.float() * 5000).to(torch.int32) & 255).to(torch.uint8)
                factors = torch.full_like(factors, _RANDOM_SCALE, dtype=torch.uint8)
            self._fill(own[0], factors[0], expert)


class GptOssMLP(RoutedMLP):
    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        # A softmax over the chosen logits is a softmax over all, renormalised.
        routing = Routing(config.num_experts_per_tok, renormalise=True)
        hidden, count = config.hidden_size, config.num_local_experts
        self.router = Router(hidden, count, routing, fmt, bias=True)
        self.experts = GptOssExperts(config, fmt)

    @property
    def scorer(self) -> Router:
        return self.router

    def routed(
        self, x: Tensor, stream: Tensor, chosen: Chosen, fuses: bool
    ) -> tuple[Tensor, Tensor | None]:
        if fuses and self.experts.adds(x.shape[0]):
            return self.experts.add(x, stream, *chosen), None
        return self.experts.sum(self.experts.parts(x, *chosen)), stream


class GptOssLayer(DecoderLayer):
    def make_attention(
        self, config: Any, index: int, layer_id: int, fmt: WeightFormat
    ) -> Attention:
        return SinkAttention(config, index, layer_id, fmt)

    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        return GptOssMLP(config, fmt)


class GptOssModel(LlamaModel):
    layer_type = GptOssLayer
