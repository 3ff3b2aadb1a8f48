"""Measures attention of prompts on a GPU: the kernel of long queries with different tiles beside
the kernel of any queries and torch's attention over contiguous keys.

    PYTHONPATH=.src python tests/lab/measure_prefill.py

Prints microseconds a layer of Llama-8B's shape and TFLOP/s, counting visible keys only. All kernels
are compiled first, in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from linear_tune import time_in_graph
from torch import Tensor
from triton.errors import TritonError

from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.attention.triton.paged_attention import _attend
from slipstream.kernels.attention.triton.prefill import Tiles, prefill_attention

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
TILES = (
    *(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 2), Tiles(128, 64, 4, 2)),
    *(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 128, 4, 2), Tiles(128, 32, 8, 4)),
    *(Tiles(128, 64, 8, 4), Tiles(128, 128, 8, 3), Tiles(64, 32, 4, 4)),
)
CASES: tuple[tuple[str, list[tuple[int, int]]], ...] = (  # (new tokens, tokens in all) by request
    ("256", [(256, 256)]),
    ("1024", [(1024, 1024)]),
    ("3000", [(3000, 3000)]),
    ("8192 of three", [(3000, 3000), (3000, 3000), (2192, 2192)]),
    ("2048 after 6000", [(2048, 8048)]),
    ("8 prompts of 110", [(110, 110)] * 8),
)


def inputs(lengths: list[tuple[int, int]]) -> tuple[Tensor, Tensor, PagedRows]:
    """Random query rows, a shuffled KV cache, and the rows that describe them."""
    device = torch.device("cuda")
    new, total = zip(*lengths, strict=True)
    blocks = [-(-n // PAGE) for n in total]
    table = torch.zeros(len(lengths), 256 if max(blocks) <= 256 else 1024, dtype=torch.int32)
    free = torch.randperm(sum(blocks)).int() + 1
    start = 0
    for row, count in enumerate(blocks):
        table[row, :count] = free[start : start + count]
        start += count
    cache = torch.randn(2, start + 1, PAGE, KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    query = torch.randn(sum(new), HEADS, DIM, device=device, dtype=torch.bfloat16)
    starts = torch.tensor([0, *new]).cumsum(0).int().to(device)
    lens = torch.tensor(total).int().to(device)
    slots = torch.zeros(sum(new), dtype=torch.int64, device=device)
    return query, cache, PagedRows(table.to(device), starts, lens, max(new), slots)


def flops(lengths: list[tuple[int, int]]) -> float:
    """Floating-point operations over the visible keys."""
    pairs = sum(sum(range(total - new + 1, total + 1)) for new, total in lengths)
    return 4.0 * DIM * HEADS * pairs


def main() -> None:
    rule = AttentionRule(scale=DIM**-0.5)
    made = [inputs(lengths) for _, lengths in CASES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        query, cache, rows = made[0]
        out = torch.empty_like(query)
        list(pool.map(lambda t: prefill_attention(query, cache, rows, rule, out, t), TILES))
    for (title, lengths), arguments in zip(CASES, made, strict=True):
        print(f"{title}:")
        measure(lengths, *arguments, rule)


def measure(
    lengths: list[tuple[int, int]],
    query: Tensor,
    cache: Tensor,
    rows: PagedRows,
    rule: AttentionRule,
) -> None:
    """Print a line for each kernel."""
    work, out, exact = flops(lengths), torch.empty_like(query), torch.empty_like(query)

    def show(name: str, call: Callable[[], object]) -> None:
        microseconds = time_in_graph([call] * 8)
        rate = work / microseconds / 1e6
        print(f"  {microseconds:8.1f} us  {rate:6.1f} TFLOP/s  {name}", flush=True)

    # given splits, it does not turn to the kernel of long queries
    show("any queries", lambda: _attend(query, cache, rows, rule, 1, exact))
    for tiles in TILES:
        call = partial(prefill_attention, query, cache, rows, rule, out, tiles)
        try:
            call()
            error = float((out.float() - exact.float()).norm() / exact.float().norm())
            show(f"{tiles} error {error:.1e}", call)
        except (RuntimeError, TritonError) as problem:  # a tile that does not fit
            print(f"  {tiles}: {type(problem).__name__} {str(problem)[:80]}")
    if len(lengths) == 1 and lengths[0][0] == lengths[0][1]:
        q = query.transpose(0, 1).unsqueeze(0)
        k = torch.randn(1, KV_HEADS, len(query), DIM, device="cuda", dtype=torch.bfloat16)
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        show("torch, contiguous keys", lambda: attend(q, k, k))


if __name__ == "__main__":
    main()
