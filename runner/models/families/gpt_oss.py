"""gpt-oss: attention with sinks and alternating sliding windows, and biased clamped experts.

Checkpoints store the experts as MXFP4 (blocks of 32 numbers of 4 bits with a common power of two),
or as stacked matrices [in, out]. MXFP4 stays so in memory where kernels read it, and is widened
elsewhere.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.linear.experts import ExpertWeights, PackedExperts, Routing
from ....kernels.linear.linear import Norm
from ....kernels.linear.moe import expert_parts, run_experts
from ....kernels.packed.experts import packed_expert_parts
from ....kernels.quant.packed import PackedWeight, e2m1_numbers
from ....kernels.quant.tiled import TiledWeight, has_kernels, tile
from ...errors import ModelLoadError
from ...parallel.ranks import Cut
from ..layers import CheckpointSlot, WeightFormat, tensor_slot
from ..llama import Attention, DecoderLayer, FeedForward, LlamaModel
from ..moe import Router
from ..sharded import split_tensor

_GROUP = 32  # numbers that share a scale
_ACTIVATION = "clamped_swiglu"
_PACKED_DTYPES = (torch.bfloat16,)  # of activations; fp16 cannot hold every scale
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


class GptOssExperts(nn.Module):
    """All experts of a layer. Checkpoints alternate the rows of gate and up."""

    gate_up: Tensor  # [E, 2I, H], the rows of gate first; of packed experts none
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
        self.ranks, self.share, self.intermediate = fmt.ranks, Cut(0, 0, size), size
        if fmt.experts is not None or (fmt.ranks is not None and fmt.ranks.by_expert):
            raise ModelLoadError("--enable-expert-parallel is not supported for gpt-oss.")
        if fmt.ranks is not None:
            self.share = fmt.ranks.share(size, "intermediate features of an expert")
            size = self.share.size
        empty = functools.partial(torch.empty, device=fmt.device)
        is_packed = fmt.packed and fmt.ranks is None and fmt.dtype in _PACKED_DTYPES
        self.is_packed = is_packed and _has_kernels(fmt.device)
        self.shapes = {"gate_up": (count, 2 * size, hidden), "down": (count, hidden, size)}
        for name, (_, rows, columns) in self.shapes.items():
            if self.is_packed:
                words = empty(count * rows, -(-columns // _SPAN) * _SPAN // 4, dtype=torch.int16)
                scales = empty(count * rows, columns // _GROUP, dtype=torch.uint8)
                self.register_buffer(f"{name}_words", words)
                self.register_buffer(f"{name}_scales", scales)
            else:
                self.register_buffer(name, empty(count, rows, columns, dtype=fmt.dtype))
            self.register_buffer(f"{name}_bias", empty(count, rows, dtype=fmt.dtype))
        self.expert_share = config.num_experts_per_tok / count
        self.alpha = float(getattr(config, "swiglu_alpha", 1.702))
        self.limit = float(getattr(config, "swiglu_limit", 7.0))

    def parts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """See `kernels.linear.moe.expert_parts`."""
        first, last = self.gate_up_bias, self.down_bias
        rule = _ACTIVATION, self.alpha, self.limit
        if not self.is_packed:
            wide = ExpertWeights(self.gate_up, self.down, first, last, *rule)
            if self.ranks is not None:
                return run_experts(x, wide, weights, ids)
            return expert_parts(x, wide, weights, ids)
        gate_up, down = self._tiled("gate_up"), self._tiled("down")
        packed = PackedExperts(gate_up, down, len(last), first, last, *rule)
        return packed_expert_parts(x, packed, weights, ids)

    def _tiled(self, name: str) -> TiledWeight:
        words, scales = getattr(self, f"{name}_words"), getattr(self, f"{name}_scales")
        return TiledWeight("fp4", words, scales, self.shapes[name][2], _GROUP)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        path = f"{parent}{name}"
        count, hidden, whole = self.shapes["down"][0], self.shapes["down"][1], self.intermediate
        for part, shape in (
            ("gate_up", (count, 2 * whole, hidden)),
            ("down", (count, hidden, whole)),
        ):
            alternates = part == "gate_up"
            bias = getattr(self, f"{part}_bias")
            fill = functools.partial(_fill, bias, alternates, self.share if alternates else None)
            if not alternates and self.ranks is not None and self.ranks.rank > 0:
                fill = functools.partial(_fill_zeros, bias)  # the sum over ranks holds it once
            yield f"{path}.{part}_proj_bias", CheckpointSlot(shape[:2], fill, "zeros")
            if self.is_packed:
                pair = _BlocksAndScales(functools.partial(self._fill_words, part, alternates))
            else:
                fill = functools.partial(_fill, getattr(self, part), alternates, self.share)
                load = functools.partial(_transposed, fill)
                form = (path, "matrices")
                slot = CheckpointSlot((shape[0], shape[2], shape[1]), load, form=form)
                yield f"{path}.{part}_proj", slot
                pair = _BlocksAndScales(functools.partial(_fill_numbers, fill))
            grid, form = (*shape[:2], shape[2] // _GROUP), (path, "mxfp4")
            slot = CheckpointSlot((*grid, _GROUP // 2), pair.take_blocks, form=form)
            yield f"{path}.{part}_proj_blocks", slot
            yield f"{path}.{part}_proj_scales", CheckpointSlot(grid, pair.take_scales, form=form)

    def _fill_words(
        self, name: str, alternates: bool, blocks: Tensor, scales: Tensor, expert: int
    ) -> None:
        """Take the blocks [1, R, C / 32, 16] and scales [1, R, C / 32] of one expert."""
        rows, columns = self.shapes[name][1:]
        values = torch.empty_like(blocks)
        factors = torch.empty_like(scales)
        share = self.share if alternates else None  # all: ranks have no words
        _fill(values, alternates, share, blocks)
        _fill(factors, alternates, share, scales)
        packed = PackedWeight("fp4", values.view(rows, -1), factors.view(rows, -1), columns, _GROUP)
        own = slice(expert * rows, (expert + 1) * rows)
        getattr(self, f"{name}_words")[own] = tile(packed).words
        getattr(self, f"{name}_scales")[own] = packed.scales


def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels of a device read MXFP4; True for an outline, which only has shapes."""
    some = torch.zeros(1, _GROUP // 2, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    return device.type == "meta" or has_kernels(PackedWeight("fp4", *some, _GROUP, _GROUP), device)


def _fill(
    target: Tensor,
    alternates: bool,
    share: Cut | None,
    stored: Tensor,
    experts: slice = slice(None),
) -> None:
    """Copy the matrices or biases [e, ...] of some experts into `target`.

    If rows of gate and up alternate, those of gate come first. `share` is this rank's part of the
    intermediate features: pairs of such rows, or else of the columns.
    """
    own = target[experts]
    if not alternates:
        own.copy_(stored if share is None else stored[..., share.start : share.stop])
        return
    assert share is not None
    size = share.size
    pairs = stored[:, 2 * share.start : 2 * share.stop]
    own[:, :size].copy_(pairs[:, 0::2])
    own[:, size:].copy_(pairs[:, 1::2])


def _fill_zeros(target: Tensor, stored: Tensor) -> None:
    target.zero_()


def _transposed(fill: Callable[..., None], stored: Tensor) -> None:
    fill(stored.transpose(1, 2))


def _fill_numbers(fill: Callable[..., None], blocks: Tensor, scales: Tensor, expert: int) -> None:
    fill(mxfp4_numbers(blocks, scales), slice(expert, expert + 1))


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
            self._fill(own, factors, expert)


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Widen MXFP4 blocks [..., B, 16] uint8 with scales [..., B] uint8 to float32 [..., 32 B].

    A byte holds two numbers, the first in its low bits; scales are powers of two, offset by 127.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [..., B, 32]
    exponents = (scales.to(torch.int32) - 127).unsqueeze(-1)
    return torch.ldexp(e2m1_numbers(codes), exponents).flatten(-2)


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
        out = self.experts.parts(hidden, *self.router.forward(hidden))
        return out if self.experts.ranks is None else self.experts.ranks.sum(out)

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
