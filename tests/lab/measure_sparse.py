"""Measures Triton's sparse attention of few tokens, with lists split over programs and whole.

`PYTHONPATH=.src python tests/lab/measure_sparse.py` on a GPU prints microseconds of a layer of
DeepSeek V3.2's shape (128 heads, 2,048 rows of 576 values) and of V4 Flash's (64 heads, 128 raw
rows and 512 entries of 512 values) for each number of splits; the one that is chosen has a star.
"""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import torch
from linear_tune import time_in_graph
from torch import Tensor

from slipstream.kernels.attention.compressed.pages import Pages, SlotList
from slipstream.kernels.attention.compressed.triton import sparse_attention as module
from slipstream.kernels.attention.triton.attention_plan import num_splits
from slipstream.kernels.device import num_processors

CUDA = torch.device("cuda")
LAYERS = 8  # each with a cache of its own, so that rows come from memory
COUNTS = (1, 2, 4, 8, 16, 32, 64)
SPLITS = (1, 2, 4, 8, 16)
BLOCKS, ROWS = 512, 64


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def pages_of(dim: int) -> Pages:
    table = torch.arange(BLOCKS, device=CUDA).int()[None]
    slots = torch.arange(1, device=CUDA)
    return Pages(randn(BLOCKS, ROWS, 1, dim), table, slots, ROWS)


def list_of(tokens: int, width: int) -> SlotList:
    slots = torch.rand(tokens, BLOCKS * ROWS, device=CUDA).argsort(1)[:, :width].int()
    return SlotList(slots.contiguous(), torch.full((tokens,), width, device=CUDA).int())


def main() -> None:
    shapes = {"V3.2": (128, 576, 2048, None), "V4 Flash": (64, 512, 128, 512)}
    for name, (heads, dim, width, more) in shapes.items():
        caches = [pages_of(dim) for _ in range(LAYERS)]
        for tokens in COUNTS:
            query, listed = randn(tokens, heads, dim), list_of(tokens, width)
            entries = None if more is None else list_of(tokens, more)
            sinks = None if more is None else torch.zeros(heads, device=CUDA)
            calls = [
                partial(
                    module.sparse_attention, query, cache, listed,
                    None if more is None else cache, entries, sinks, dim**-0.5, 512,
                )
                for cache in caches
            ]  # fmt: skip
            programs = tokens * -(-heads // 32)
            rows = width + (more or 0)
            chosen = num_splits(programs, rows, num_processors(CUDA), module._LEAST_ROWS)
            times = []
            for splits in SPLITS:
                with patch.object(module, "num_splits", lambda *_, splits=splits: splits):
                    star = "*" if splits == chosen else ""
                    times.append(f"{splits}: {time_in_graph(calls):.1f}{star}")
            print(f"{name:8} {tokens:3} tokens, us by splits  {'  '.join(times)}", flush=True)


if __name__ == "__main__":
    main()
