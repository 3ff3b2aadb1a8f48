"""Runs the blocks of a model for few rows: attention, and one kernel between two attentions.

It serves models of plain blocks whose matrices are all quantised in one format that the kernel
knows, on one GPU. Every other step runs block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ....kernels.linear.linear import Norm
from ....kernels.packed.persistent.row_layer import MOST_ROWS, multiply_row, row_layers_wanted
from ....kernels.packed.persistent.row_weights import RowLayer, fits_row_layer
from ....kernels.quant.tiled import TiledWeight
from ...attention.base import AttentionState
from .packed import PackedLayer


@dataclass(frozen=True)
class RowWeights:
    """The weights of a block, and the norms before attention and before gate and up."""

    qkv: TiledWeight
    o: TiledWeight
    gate_up: TiledWeight
    down: TiledWeight
    input_norm: Norm
    inner_norm: Norm

    @classmethod
    def of(
        cls, matrices: Sequence[TiledWeight | None], norms: tuple[Norm, Norm]
    ) -> RowWeights | None:
        """Matrices in the order of the fields; None if one of them is."""
        qkv, o, gate_up, down = matrices
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        return cls(qkv, o, gate_up, down, *norms)


class RowBlock(Protocol):
    """A pre-norm block whose parts can be computed one by one."""

    def row_weights(self) -> RowWeights | None:
        """Its weights; None if its parts are not those of `RowWeights` alone."""

    def enter_row(self, hidden: Tensor) -> Tensor:
        """Query, key and value [M, N], or parts [S, M, N], of the stream [M, H]."""

    def attend_row(self, qkv: Tensor, rotary: Any, attention: AttentionState) -> Tensor:
        """What attention computes of them before the output projection, [M, heads * head_dim]."""


def tiled_matrix(packed: PackedLayer | None, bias: Tensor | None) -> TiledWeight | None:
    """The matrix of a linear layer if that is all that the layer has, in the kernels' form."""
    whole = None if packed is None or packed.torch_only or bias is not None else packed.whole
    return whole if isinstance(whole, TiledWeight) else None


class RowDecoder:
    """Runs blocks for few rows; see the top of the file."""

    def __init__(self, device: torch.device) -> None:
        # Made here, because a graph that is being captured could not fill it.
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._known: dict[tuple[int, ...], list[RowLayer] | None] = {}

    def runs(self, blocks: Sequence[Any], hidden: Tensor) -> bool:
        """Whether `run` can take the place of these blocks for the rows `hidden` [M, H]."""
        if hidden.shape[0] > MOST_ROWS or not row_layers_wanted():
            return False
        return self._layers(blocks, hidden) is not None

    def run(
        self,
        blocks: Sequence[Any],
        hidden: Tensor,
        rotary: Any,
        attention: AttentionState,
        keep: Callable[[int, Tensor], None],
    ) -> Tensor:
        """The stream [M, H] after all blocks. `keep` gets the index of each block and the stream
        before it, and at the end their number and the result."""
        layers = self._layers(blocks, hidden)
        assert layers is not None
        left, qkv = iter(layers), None
        for index, block in enumerate(blocks):
            keep(index, hidden)
            if _is_left_out(block):
                continue
            qkv = block.enter_row(hidden) if qkv is None else qkv
            attended = block.attend_row(qkv, rotary, attention)
            hidden, qkv = multiply_row(attended, hidden, next(left), self._counter)
        keep(len(blocks), hidden)
        return hidden

    def _layers(self, blocks: Sequence[Any], hidden: Tensor) -> list[RowLayer] | None:
        """The weights after each attention; None if the kernel does not know them."""
        key = tuple(map(id, blocks))
        if key not in self._known:
            self._known[key] = _chained(blocks, hidden)
        return self._known[key]


def _is_left_out(block: Any) -> bool:
    """Whether nothing runs in this block's place (`SkippedBlock`)."""
    return bool(getattr(block, "skips", False))


def _chained(blocks: Sequence[Any], hidden: Tensor) -> list[RowLayer] | None:
    kept = [block for block in blocks if not _is_left_out(block)]
    found: list[RowWeights] = []
    for block in kept:
        own = block.row_weights() if hasattr(block, "row_weights") else None
        if own is None:
            return None
        found.append(own)
    layers = []
    for own, after in zip(found, [*found[1:], None], strict=True):
        qkv, norm = (None, None) if after is None else (after.qkv, after.input_norm)
        layers.append(RowLayer(own.o, own.gate_up, own.down, qkv, own.inner_norm, norm))
    fits = all(fits_row_layer(layer, hidden.dtype, hidden.device) for layer in layers)
    return layers if fits and layers and layers[0].is_large else None
