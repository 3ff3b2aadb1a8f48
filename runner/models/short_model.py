"""Skips the duplicate blocks of a model's forward pass.

A dry start, and the runs before a capture, need to launch each kernel once: 30 equal blocks launch
the same kernels as two. The model's layers stay in place; only running it is shortened.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...kernels.linear.linear_choice import Shape
from ..attention.base import AttentionLayer
from .base import BlockModel


def shorten(model: Any) -> int:
    """Replace a model's duplicate blocks for good; return how many remain (0: not supported)."""
    if not isinstance(model, BlockModel):
        return 0
    model._blocks = short_blocks(model)
    return sum(block is not model.skipped for block in model._blocks)


def short_blocks(model: BlockModel) -> list[Any]:
    """The model's blocks with every duplicate replaced by a no-op.

    A block is a duplicate if an earlier block was built with equal parameters and followed a block
    of equal parameters, since the launches also depend on the form of the block's input.
    """
    seen: set[tuple[Hashable, Hashable]] = set()
    before: Hashable = None
    blocks: list[Any] = []
    for block in model._blocks:
        kind = _kind_of(block)
        blocks.append(model.skipped if (before, kind) in seen else block)
        seen.add((before, kind))
        before = kind
    return blocks


class ShortPass:
    """Temporarily runs a model without its duplicate blocks, if the model supports it."""

    def __init__(self, model: Any) -> None:
        self._model = model if isinstance(model, BlockModel) else None
        self._blocks: list[Any] | None = None  # found when first needed

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the model skips its duplicate blocks."""
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
    """A key of everything that a block's launches depend on; unique for unknown blocks."""
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
    """A key of everything that an attention layer's kernels depend on."""
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v, layer.is_mla)
    reads_only = layer.kv_source is not None
    return (*sizes, layer.sliding_window, layer.softcap, layer.sinks is not None, reads_only)
