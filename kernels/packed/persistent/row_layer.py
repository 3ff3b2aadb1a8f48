"""All products between two attentions of few rows: output projection, feed-forward layer, and the
next layer's query, key and value, with their norms and residuals.

One kernel computes them all, so that the memory does not rest between them; see
`triton/hopper_row.py`.
"""

from __future__ import annotations

import os

from torch import Tensor
from torch.nn import functional

from ...linear.norm_rope import fused_add_rms_norm_reference
from ...quant.tiled import TiledWeight
from .row_weights import RowLayer

MOST_ROWS = 4  # that the kernel knows


def row_layers_wanted() -> bool:
    """Whether models use it: they do, unless SLIPSTREAM_ROW_LAYER=0.

    Processes that share a GPU by MPS must turn it off, because each of two launches could keep
    multiprocessors that the other waits for.
    """
    return os.environ.get("SLIPSTREAM_ROW_LAYER") != "0"


def multiply_row(
    x: Tensor, residual: Tensor, layer: RowLayer, counter: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the stream [M, H] after a layer, and query, key and value [M, N] of the next one.

    x: [M, heads * head_dim], what attention computed; residual: [M, H], the stream before it;
    counter: [1] int32, zero before the first launch that uses it, and of no two launches that may
    run at the same time. All must be on a GPU, and `fits_row_layer` be True. No row depends on
    another. M is at most 4.
    """
    from .triton.hopper_row import multiply

    found: tuple[Tensor, Tensor | None] = multiply(x, residual, layer, counter)
    return found


def multiply_row_reference(
    x: Tensor, residual: Tensor, layer: RowLayer
) -> tuple[Tensor, Tensor | None]:
    """The plain version of `multiply_row`."""

    def product(row: Tensor, weight: TiledWeight) -> Tensor:
        return row @ weight.dequantise(row.dtype).T

    attended = product(x, layer.o)
    row, middle = fused_add_rms_norm_reference(attended, residual, *layer.norm)
    gate, up = product(row, layer.gate_up).chunk(2, -1)
    fed = product(functional.silu(gate) * up, layer.down)
    if layer.qkv is None or layer.next_norm is None:
        return middle + fed, None
    row, stream = fused_add_rms_norm_reference(fed, middle, *layer.next_norm)
    return stream, product(row, layer.qkv)
