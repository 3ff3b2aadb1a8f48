"""Leaves out of a model's forward pass the blocks that repeat one before them.

For a dry start and for the runs before a capture, which want each kernel to be launched once: 30
blocks that are alike launch what two do. The model's layers stay; only running it is short.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...kernels.linear.linear_choice import Shape
from ..attention.base import AttentionLayer, AttentionState
from .base import PreNormModel
from .rotary import RotaryStep


class _Repeated:
    """In place of a block that would launch what another has launched."""

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
    ) -> tuple[Tensor, Tensor | None]:
        return hidden, residual


def shorten(model: Any) -> int:
    """Replace repeated blocks of a model that has some; returns how many are left to run."""
    if not isinstance(model, PreNormModel):
        return 0
    model._blocks = short_blocks(model)
    return sum(not isinstance(block, _Repeated) for block in model._blocks)


def short_blocks(model: PreNormModel) -> list[Any]:
    """The model's blocks, with something that does nothing in place of each that repeats another.

    A block repeats another if both are made alike and come after such as are made alike: what the
    one before hands over is part of the launch.
    """
    seen: set[tuple[Hashable, Hashable]] = set()
    before: Hashable = None
    blocks: list[Any] = []
    for block in model._blocks:
        kind = _kind_of(block)
        blocks.append(_Repeated() if (before, kind) in seen else block)
        seen.add((before, kind))
        before = kind
    return blocks


class ShortPass:
    """Runs a model without its repeated blocks for a while; any other model as it is."""

    def __init__(self, model: Any) -> None:
        self._model = model if isinstance(model, PreNormModel) else None
        self._blocks: list[Any] | None = None  # found when first needed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the model is short."""
        if self._model is None:
            yield
            return
        if self._blocks is None:
            self._blocks = short_blocks(self._model)
        whole, self._model._blocks = self._model._blocks, self._blocks
        try:
            yield
        finally:
            self._model._blocks = whole


def _kind_of(block: Any) -> Hashable:
    """What a block's launches depend on; of an unknown kind of block, itself."""
    if not isinstance(block, nn.Module):
        return id(block)
    return tuple((name, _kind_of_module(module)) for name, module in block.named_modules())


def _kind_of_module(module: nn.Module) -> Hashable:
    values = vars(module).items()
    plain = [(k, v) for k, v in values if isinstance(v, bool | int | float | str | Shape | None)]
    layers = [attention_kind(v) for _, v in values if isinstance(v, AttentionLayer)]
    own = (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))
    tensors = [(name, tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in own]
    return type(module), tuple(plain), tuple(layers), tuple(tensors)


def attention_kind(layer: AttentionLayer) -> tuple[Hashable, ...]:
    """What the kernels of an attention layer depend on."""
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v, layer.is_mla)
    reads_only = layer.kv_source is not None
    return (*sizes, layer.sliding_window, layer.softcap, layer.sinks is not None, reads_only)
