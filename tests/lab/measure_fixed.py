"""Times the kernels of `--batch-invariant` beside those of ordinary steps, for Llama-8B's shape.

    PYTHONPATH=.src python tests/lab/measure_fixed.py [linear] [attention]

Each line has microseconds: of the kernel that an ordinary step has for this number of rows, of the
fixed kernel, and of other tiles that round alike. The last column says whether all results of the
fixed kernels are bitwise equal. Weights rotate, so that none comes from L2.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention.paged_attention import paged_attention
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.linear.fixed import tiles_for
from slipstream.kernels.linear.linear import gated_linear, linear
from slipstream.kernels.linear.linear_choice import Fixed, Shape
from slipstream.kernels.linear.linear_tuned import create_chooser

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16
SHAPES = (
    Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096),
    Shape("gate_up", 28672, 4096),
    Shape("down", 4096, 14336),
    Shape("head", 128256, 4096),
)
OTHERS = {  # by the most rows: (block_n, block_k, stages, warps)
    16: [(64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (128, 128, 3, 4), (128, 128, 4, 8)],
    64: [(64, 64, 6, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 8)],
    256: [(64, 64, 4, 8), (128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 2, 8)],
}


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """The mean time of `run(i)`, with i from 0 to copies - 1, replayed from a graph."""
    for index in range(copies):
        run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            run(index)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rounds = 5
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / rounds / copies


def measure_linear() -> None:
    chooser = create_chooser("auto", CUDA, BF16)
    print("layer rows ordinary fixed others equal")
    for shape in SHAPES:
        size = shape.outputs * shape.inputs * 2
        copies = max(2, min(12, -(-400_000_000 // size)))
        scale = shape.inputs**-0.5
        weights = [
            torch.randn(shape.outputs, shape.inputs, device=CUDA, dtype=BF16) * scale
            for _ in range(copies)
        ]
        for rows in (1, 8, 32, 64, 256, 2048, 8192):
            if shape.role == "head" and rows > 256:
                continue
            x = torch.randn(rows, shape.inputs, device=CUDA, dtype=BF16)

            def compute(index: int, choice: Any, x: Tensor = x, role: str = shape.role) -> Tensor:
                if role == "gate_up":
                    return gated_linear(x, weights[index], None, "silu", choice)  # noqa: B023
                return linear(x, weights[index], None, choice)  # noqa: B023

            ordinary = None if chooser is None else chooser.choose(shape, rows)
            own = tiles_for(shape, rows)
            expected = compute(0, own)
            times = [
                microseconds(lambda i, c=choice: compute(i, c), copies)  # type: ignore[misc]
                for choice in (ordinary, own)
            ]
            line, equal = [f"{time:.1f}" for time in times], True
            most = next((m for m in OTHERS if rows <= m), 256)
            for sizes in OTHERS[most]:
                if shape.role == "gate_up" and sizes[0] * own.block_m > 64 * 256:
                    continue  # two accumulators
                other = Fixed(*sizes, 1, own.block_m)
                try:
                    equal &= torch.equal(compute(0, other), expected)
                    time = microseconds(lambda i, c=other: compute(i, c), copies)  # type: ignore[misc]
                    line.append(f"{'x'.join(map(str, sizes))}:{time:.1f}")
                except Exception as error:
                    line.append(f"{'x'.join(map(str, sizes))}:{type(error).__name__}")
            print(shape.role, rows, *line, equal, flush=True)


def measure_attention() -> None:
    rule = AttentionRule(scale=128**-0.5)
    print("requests query_len keys ordinary fixed")
    sizes = itertools.product((1, 8, 32, 64), (1, 4), (300, 3500))
    for requests, query_len, keys in [*sizes, (1, 2048, 2048), (4, 2048, 2048)]:
        pages = 256
        cache = torch.randn(2, requests * pages, 16, 8, 128, device=CUDA, dtype=BF16)
        table = torch.randperm(requests * pages, device=CUDA).int().view(requests, pages)
        starts = torch.arange(requests + 1, device=CUDA, dtype=torch.int32) * query_len
        lens = torch.full((requests,), keys, device=CUDA, dtype=torch.int32)
        slots = torch.empty(0, dtype=torch.int64, device=CUDA)
        query = torch.randn(requests * query_len, 32, 128, device=CUDA, dtype=BF16)
        times = []
        for fixed in (False, True):
            rows = PagedRows(table, starts, lens, query_len, slots, fixed=fixed)
            times.append(
                microseconds(lambda _, r=rows: paged_attention(query, cache, r, rule), 4)  # type: ignore[misc] # noqa: B023
            )
        print(requests, query_len, keys, *(f"{time:.1f}" for time in times), flush=True)


if __name__ == "__main__":
    parts = sys.argv[1:] or ["linear", "attention"]
    torch.manual_seed(0)
    with torch.inference_mode():
        if "linear" in parts:
            measure_linear()
        if "attention" in parts:
            measure_attention()
