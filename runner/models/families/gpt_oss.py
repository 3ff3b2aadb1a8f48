"""gpt-oss: attention with sinks and alternating sliding windows, and biased clamped experts.

Checkpoints store the experts as MXFP4 (blocks of 32 numbers of 4 bits with a common power of two),
which is widened while it is loaded, or as stacked matrices [in, out].
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.linear.experts import ExpertWeights, Routing
from ....kernels.linear.linear import Norm
from ....kernels.linear.moe import expert_parts
from ...errors import ModelLoadError
from ..layers import CheckpointSlot, WeightFormat, tensor_slot
from ..llama import Attention, DecoderLayer, FeedForward, LlamaModel
from ..moe import Router

_GROUP = 32  # numbers that share a scale
# e2m1: a sign bit above the index of the magnitude
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class SinkAttention(Attention):
    """Attention in which each query head also attends to a learned logit without a value."""

    sinks: Tensor  # [Hq]

    def __init__(self, config: Any, index: int, layer_id: int, fmt: WeightFormat) -> None:
        super().__init__(config, index, layer_id, fmt)
        empty = torch.empty(self.num_heads, dtype=torch.float32, device=fmt.device)
        self.register_buffer("sinks", empty)
        self.layer = replace(self.layer, sinks=self.sinks)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.sinks", tensor_slot(self.sinks)


class GptOssExperts(nn.Module):
    """All experts of a layer. Checkpoints alternate the rows of gate and up."""

    gate_up: Tensor  # [E, 2I, H], the rows of gate first
    down: Tensor  # [E, H, I]
    gate_up_bias: Tensor  # [E, 2I]
    down_bias: Tensor  # [E, H]

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        count, hidden, size = config.num_local_experts, config.hidden_size, config.intermediate_size
        if hidden % _GROUP or size % _GROUP:
            raise ModelLoadError(
                f"hidden_size {hidden} and intermediate_size {size} must be multiples of {_GROUP}."
            )
        empty = functools.partial(torch.empty, dtype=fmt.dtype, device=fmt.device)
        self.register_buffer("gate_up", empty(count, 2 * size, hidden))
        self.register_buffer("down", empty(count, hidden, size))
        self.register_buffer("gate_up_bias", empty(count, 2 * size))
        self.register_buffer("down_bias", empty(count, hidden))
        self.expert_share = config.num_experts_per_tok / count
        self.alpha = float(getattr(config, "swiglu_alpha", 1.702))
        self.limit = float(getattr(config, "swiglu_limit", 7.0))

    @property
    def weights(self) -> ExpertWeights:
        """The stacked weights."""
        own = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return ExpertWeights(*own, "clamped_swiglu", self.alpha, self.limit)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        path = f"{parent}{name}"
        biases = {"gate_up_proj_bias": self.gate_up_bias, "down_proj_bias": self.down_bias}
        for part, bias in biases.items():
            load = functools.partial(_fill, bias, part.startswith("gate"))
            yield f"{path}.{part}", CheckpointSlot(tuple(bias.shape), load, "zeros")
        for part, target in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            fill = functools.partial(_fill, target, part == "gate_up_proj")
            count, rows, columns = target.shape
            shape = (count, columns, rows)
            load = functools.partial(_transposed, fill)
            yield f"{path}.{part}", CheckpointSlot(shape, load, form=(path, "matrices"))
            pair = _BlocksAndScales(fill)
            grid = (count, rows, columns // _GROUP)
            mxfp4 = (path, "mxfp4")
            slot = CheckpointSlot((*grid, _GROUP // 2), pair.take_blocks, form=mxfp4)
            yield f"{path}.{part}_blocks", slot
            yield f"{path}.{part}_scales", CheckpointSlot(grid, pair.take_scales, form=mxfp4)


def _fill(target: Tensor, alternates: bool, stored: Tensor, experts: slice = slice(None)) -> None:
    """Copy rows [e, rows, ...] of some experts into `target`, those of gate first."""
    own = target[experts]
    if not alternates:
        own.copy_(stored)
        return
    size = own.shape[1] // 2
    own[:, :size].copy_(stored[:, 0::2])
    own[:, size:].copy_(stored[:, 1::2])


def _transposed(fill: Callable[..., None], stored: Tensor) -> None:
    fill(stored.transpose(1, 2))


class _BlocksAndScales:
    """Joins the two tensors of an MXFP4 stack, which may be loaded in any order."""

    def __init__(self, fill: Callable[..., None]) -> None:
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
        for expert in range(blocks.shape[0]):  # one at a time, so that float32 copies stay small
            at = slice(expert, expert + 1)
            self._fill(mxfp4_numbers(blocks[at], scales[at]), at)


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Widen MXFP4 blocks [..., B, 16] uint8 with scales [..., B] uint8 to float32 [..., 32 B].

    A byte holds two numbers, the first in its low bits; scales are powers of two, offset by 127.
    """
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [..., B, 32]
    exponents = (scales.to(torch.int32) - 127).unsqueeze(-1)
    return torch.ldexp(table[codes.int()], exponents).flatten(-2)


class GptOssMLP(nn.Module):
    """A router and its experts."""

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        # A softmax over the chosen logits is a softmax over all, renormalised.
        routing = Routing(config.num_experts_per_tok, renormalise=True)
        hidden, count = config.hidden_size, config.num_local_experts
        self.router = Router(hidden, count, routing, fmt, bias=True)
        self.experts = GptOssExperts(config, fmt)

    def parts(
        self, hidden: Tensor, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """hidden: [M, H] -> [M, H], or partial sums [S, M, H], which the next norm adds up.

        `norms` and `adds` say that it gets neither norm nor residual.
        """
        assert norm is None and residual is None
        return expert_parts(hidden, self.experts.weights, *self.router.forward(hidden))

    def norms(self, num_rows: int) -> bool:
        """As `MLP.norms`: never, since router and experts read the same normed rows."""
        return False

    def adds(self, num_rows: int) -> bool:
        """As `MLP.adds`: never."""
        return False


class GptOssLayer(DecoderLayer):
    """A pre-norm block."""

    def make_attention(
        self, config: Any, index: int, layer_id: int, fmt: WeightFormat
    ) -> Attention:
        """As the base class, with sinks."""
        return SinkAttention(config, index, layer_id, fmt)

    def make_mlp(self, config: Any, index: int, fmt: WeightFormat) -> FeedForward:
        """As the base class: experts in every layer."""
        return GptOssMLP(config, fmt)


class GptOssModel(LlamaModel):
    """The whole model."""

    layer_type = GptOssLayer
