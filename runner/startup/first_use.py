"""Runs torch's own kernels once, while the worker waits for its kernels to be compiled.

They are in libraries of hundreds of megabytes, which load a part at each first use. On a machine
that has not read these files lately, this takes seconds wherever it happens. It changes no state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from ..graphs.manager import relative_error
from ..graphs.settings import GraphSettings
from ..models.layers import Linear

logger = logging.getLogger(__name__)


def load_libraries(
    models: Iterable[nn.Module | None],  # target and drafter
    max_num_tokens: int,
    graphs: GraphSettings | None,
    vocab_size: int,
) -> None:
    """Run every torch kernel that start-up will use, at the sizes of its steps."""
    found = [model for model in models if isinstance(model, nn.Module)]
    sizes = {max_num_tokens}
    if graphs is not None:
        sizes |= {*graphs.sizes, *(graphs.whole_mixed_sizes or ())}
    first_products(found, sizes)
    first_operations(next(found[0].buffers()).device, vocab_size)


def first_products(models: Iterable[nn.Module], num_rows: Iterable[int]) -> int:
    """Run the matrix products that torch will compute: each shape of a linear layer, with each
    number of rows. Returns how many products ran.

    The library chooses its kernel by all three sizes.
    """
    layers = {
        (layer.shape, layer.bias is None): layer
        for model in models
        for layer in model.modules()
        if isinstance(layer, Linear) and (layer.weight is not None or layer.packed is not None)
    }
    sizes, count = sorted(set(num_rows)), 0
    try:
        for layer in layers.values():
            count += _products_of(layer, sizes)
    except torch.OutOfMemoryError:  # sizing the KV cache reports this better
        logger.info("there is too little memory to load libraries ahead")
    return count


def _products_of(layer: Linear, sizes: list[int]) -> int:
    sizes = [rows for rows in sizes if layer.by_torch(rows)]
    if not sizes:
        return 0
    weight = layer.weight
    if weight is None:  # quantised: torch multiplies by a copy in the dtype of activations
        size, like = (layer.out_features, layer.in_features), layer.format
        weight = torch.empty(size, dtype=like.dtype, device=like.device)
    x = torch.zeros(sizes[-1], layer.in_features, dtype=weight.dtype, device=weight.device)
    for rows in sizes:
        F.linear(x[:rows], weight, layer.bias)
    return len(sizes)


def first_operations(device: torch.device, vocab_size: int) -> None:
    """Run the torch operations of the memory profile and of the attention claims' tests."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        noise = torch.randn(2, 64, device=device)
        for dtype in (torch.bfloat16, torch.float16):
            relative_error(noise.to(dtype).normal_(), noise.to(dtype))
        torch.randperm(64, device=device).int()
    logits = torch.zeros(1, vocab_size, dtype=torch.bfloat16, device=device)
    logits.float().expand(2, -1).softmax(-1).cumsum(-1)
