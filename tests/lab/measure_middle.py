"""Measures the products of Llama 8B's layers for steps of 200 to 2,300 rows on a GPU.

`PYTHONPATH=.src python tests/lab/measure_middle.py` prints first cuBLAS's time for the four
products of a layer by number of rows: it rises in steps, because the tiles of a product fill the
multiprocessors in waves. Then it prints the fastest of our kernels for some numbers of rows beside
cuBLAS. Products run in a CUDA graph over more weights than the cache holds. `rows`, `sustained` and
`kernels` choose parts; `sustained` keeps the GPU busy with products, as a server does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from linear_tune import layer_call, time_in_graph

from slipstream.kernels.linear.linear_choice import Shape, Skinny

SHAPES = (
    *(Shape("qkv", 6144, 4096), Shape("o", 4096, 4096)),
    *(Shape("gate_up", 28672, 4096), Shape("down", 4096, 14336)),
)
ROWS = (*range(208, 1041, 16), *range(1088, 2305, 64))
SOME = (272, 320, 384, 448, 512, 576, 640, 768, 1024)
TILES = (
    *((128, 64, 4, 8, 128), (128, 64, 3, 8, 256), (64, 64, 4, 4, 256), (64, 64, 5, 4, 128)),
    *((256, 64, 3, 8, 128), (128, 128, 3, 8, 128), (128, 64, 4, 4, 128)),
)
WEIGHTS = 4


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 50


def candidates(shape: Shape) -> Iterator[Skinny]:
    for block_n, block_k, stages, warps, block_m in TILES:
        if shape.role == "gate_up" and block_n * block_m > 128 * 128:
            continue
        for split in (1, 2, 3) if shape.role in ("o", "down") else (1,):
            yield Skinny(block_n, block_k, stages, warps, split, block_m)


def compile_one(shape: Shape, choice: Skinny) -> None:
    try:
        layer_call(shape, choice, random(272, shape.inputs), random(shape.outputs, shape.inputs))
        torch.cuda.synchronize()
    except Exception as error:
        print(shape.role, choice, type(error).__name__, str(error)[:80], flush=True)


def compare() -> None:
    """Print the fastest kernels beside cuBLAS."""
    pairs = [(shape, choice) for shape in SHAPES for choice in candidates(shape)]
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*pairs, strict=True)))
    for shape in SHAPES:
        weights = [random(shape.outputs, shape.inputs) for _ in range(WEIGHTS)]
        for rows in SOME:
            x, found = random(rows, shape.inputs), []
            for choice in (None, *candidates(shape)):
                try:
                    calls = [partial(layer_call, shape, choice, x, w) for w in weights]
                    found.append((time_in_graph(calls), choice))
                except Exception:
                    continue
            flops, torch_time = 2 * rows * shape.outputs * shape.inputs / 1e6, found[0][0]
            best = ", ".join(
                f"{time:.1f} us {flops / time:.0f} ({c.block_n},{c.block_k},{c.stages},"
                f"{c.num_warps},{c.split_k},{c.block_m})"
                for time, c in sorted(found[1:], key=lambda pair: pair[0])[:3]
                if c is not None
            )
            rate = flops / torch_time
            print(f"{shape.role} {rows}: torch {torch_time:.1f} us {rate:.0f}; {best}")
            sys.stdout.flush()


def by_rows() -> None:
    """Print cuBLAS's time and rate by number of rows."""
    weights = {s: [random(s.outputs, s.inputs) for _ in range(WEIGHTS)] for s in SHAPES}
    print("rows qkv o gate_up down total TFLOP/s us/row")
    for rows in ROWS:
        times = []
        for shape, made in weights.items():
            x = random(rows, shape.inputs)
            times.append(time_in_graph([partial(torch.mm, x, w.t()) for w in made]))
        total = sum(times)
        flops = 2 * rows * sum(s.outputs * s.inputs for s in SHAPES)
        each = " ".join(f"{time:.1f}" for time in times)
        print(rows, each, f"{total:.1f} {flops / total / 1e6:.0f} {total / rows:.3f}", flush=True)


def sustained(seconds: float = 1.5) -> None:
    """Print cuBLAS's rate for some numbers of rows while the GPU is busy for so long, and its
    clock and power then."""
    weights = {s: [random(s.outputs, s.inputs) for _ in range(WEIGHTS)] for s in SHAPES}
    flops_of_row = 2 * WEIGHTS * sum(shape.outputs * shape.inputs for shape in SHAPES)
    for rows in (256, 384, 448, 464, 512, 528, 640, 768, 1024, 2048):
        inputs = {shape: random(rows, shape.inputs) for shape in SHAPES}
        graph = torch.cuda.CUDAGraph()
        for _ in range(2):
            torch.mm(inputs[SHAPES[0]], weights[SHAPES[0]][0].t())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for index in range(WEIGHTS):
                for shape in SHAPES:
                    torch.mm(inputs[shape], weights[shape][index].t())
        began, count, state = time.perf_counter(), 0, ""
        while (spent := time.perf_counter() - began) < seconds:
            for _ in range(20):
                graph.replay()
            count += 20
            if not state and spent > seconds / 2:
                query = "--query-gpu=clocks.sm,power.draw"
                command = ["nvidia-smi", query, "--format=csv,noheader", "--id=0"]
                state = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            torch.cuda.synchronize()
        rate = rows * flops_of_row * count / spent / 1e12
        print(f"{rows} rows for {seconds} s: {rate:.0f} TFLOP/s; {state}", flush=True)


PARTS = {"rows": by_rows, "sustained": sustained, "kernels": compare}
if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
