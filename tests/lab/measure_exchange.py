"""What the exchange of rows between engines that share experts takes, by `--all2all-backend`.

    PYTHONPATH=.src python tests/lab/measure_exchange.py [--size 2] [--check]

First it compares the sums and the loads of both exchanges with those of whole experts: in steps
without graphs, in which rows go only where their experts are, and in CUDA graphs that are replayed
with other rows, other experts and other numbers of real rows; with --check it ends there. On a CPU
it compares those without graphs. Then it prints the microseconds of one exchange without experts,
by the rows of each engine, of DeepSeek V3's size (hidden size 7168 in bf16, 8 of 256 experts):
"gather" is allgather_reducescatter, "to ranks" all_to_all. Few rows are in a graph, many are not.
Status 1 if results differ.

To read it: multiply by the layers with experts (58 in DeepSeek V3). all_to_all can pay only where
tokens need fewer ranks than there are; on two, nearly every token needs both.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable

import torch
from measure_allreduce import recorded
from rank_scripts import run_ranks
from torch import Tensor

from slipstream.kernels.linear.experts import ExpertWeights
from slipstream.kernels.linear.moe import run_experts
from slipstream.runner.parallel.collectives import Collectives, meet
from slipstream.runner.parallel.experts import ExpertRanks, RowExchange, padded_counts
from slipstream.runner.parallel.ranks import Cut

HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 16, 4  # of the comparison
WIDE, MANY_EXPERTS, MANY = 7168, 256, 8  # of the measurement
REPEATS, LAYERS = 20, 16
FEW_ROWS, MANY_ROWS = (1, 8, 64, 256), (256, 1024, 4096)


class Layer:
    """One layer's exchange, by either backend."""

    def __init__(self, rank: int, size: int, device: torch.device, all_to_all: bool) -> None:
        self.exchange = RowExchange(Collectives(size, device), size, device, all_to_all)
        self.ranks = ExpertRanks(rank, size, self.exchange, rank)
        self.size, self.device = size, device

    def begin(self, real: list[int], rows: int, has_graphs: bool) -> None:
        self.exchange.begin_step(rows, rows, padded_counts(real, real), has_graphs)

    def loads(self, num_experts: int) -> Tensor:
        own = 1 + num_experts // self.size
        return torch.zeros(own, dtype=torch.int64, device=self.device)


def draw(rows: int, num_experts: int, top_k: int, seed: int, own: Tensor) -> tuple[Tensor, ...]:
    """Rows like `own`, weights and different experts for each, the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, own.shape[1], generator=generator).to(own)
    weights = torch.rand(rows, top_k, generator=generator).to(own.device)
    ids = torch.rand(rows, num_experts, generator=generator).argsort(1)[:, :top_k]
    return x, weights, ids.to(own.device, torch.int32)


def check(rank: int, size: int, device: torch.device, dtype: torch.dtype) -> int:
    """The number of wrong results; prints each."""
    generator, faults, rng = torch.Generator().manual_seed(1), 0, random.Random(5)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    drawn = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
    whole = ExpertWeights(*(weight.to(device, dtype) for weight in drawn))
    each = EXPERTS // size
    part = slice(rank * each, (rank + 1) * each)
    own = ExpertWeights(whole.gate_up[part].contiguous(), whole.down[part].contiguous())

    def compute(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return run_experts(rows, own, weights, ids, absent=True)

    for rows in (1, 5, 64):
        x = torch.zeros(rows, HIDDEN, dtype=dtype, device=device)
        weights = torch.zeros(rows, TOP_K, device=device)
        ids = torch.arange(TOP_K, dtype=torch.int32, device=device).repeat(rows, 1)
        for way, all_to_all in (("gather", False), ("to ranks", True)):
            layer = Layer(rank, size, device, all_to_all)
            loads, cut = layer.loads(EXPERTS), layer.ranks.share(EXPERTS)

            def work(layer: Layer = layer, cut: Cut = cut, loads: Tensor = loads) -> Tensor:
                return layer.ranks.run(x, weights, ids, cut, loads, compute)  # noqa: B023

            graph = None
            if device.type == "cuda":
                layer.begin([0] * size, rows, has_graphs=True)
                graph, out = recorded(work)
            for round in range(5):
                real = [rng.choice((0, 1, rows)) for _ in range(size)]
                drawn = [draw(rows, EXPERTS, TOP_K, 10 * round + r, x) for r in range(size)]
                for target, numbers in zip((x, weights, ids), drawn[rank], strict=True):
                    target.copy_(numbers)
                expected = torch.zeros_like(x)
                at = slice(0, real[rank])
                if real[rank]:
                    expected[at] = run_experts(x[at], whole, weights[at], ids[at])
                chosen = torch.cat([numbers[2][:count] for numbers, count in
                                    zip(drawn, real, strict=True)]).flatten().long()  # fmt: skip
                wanted = torch.bincount(chosen, minlength=EXPERTS)[part]
                for has_graphs in (False, True):
                    layer.begin(real, rows, has_graphs)
                    before = loads.clone()
                    found = work() if graph is None or not has_graphs else None
                    if found is None:
                        assert graph is not None
                        graph.replay()
                        found = out
                    counted = (loads - before).tolist()
                    close = torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.06)
                    right = counted == [chosen.numel() - int(wanted.sum()), *wanted.tolist()]
                    if not (close and right):
                        faults += 1
                        print(f"rank {rank}: {way} of {rows} rows {real} in {dtype}, graphs "
                              f"{has_graphs}: close {close}, loads right {right}")  # fmt: skip
    return faults


def microseconds(
    rank: int, size: int, device: torch.device, rows: int, way: bool, graph: bool
) -> float:
    """Of one exchange of `rows` rows of each engine; `way`: whether by all_to_all."""
    layer = Layer(rank, size, device, way)
    x = torch.zeros(rows, WIDE, dtype=torch.bfloat16, device=device)
    x, weights, ids = draw(rows, MANY_EXPERTS, MANY, rank, x)
    loads, cut = layer.loads(MANY_EXPERTS), layer.ranks.share(MANY_EXPERTS)
    layer.begin([rows] * size, rows, graph)

    def work() -> Tensor:
        out = x
        for _ in range(LAYERS):
            out = layer.ranks.run(out, weights, ids, cut, loads, lambda rows, *_: rows)
        return out

    run: Callable[[], object] = work
    if graph:
        run = recorded(work)[0].replay
    else:
        work()
    times = []
    for _ in range(REPEATS):
        layer.exchange.communicator.least([0])  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / LAYERS)
    return sorted(times)[len(times) // 2]


def run_rank(rank: int, size: int, rendezvous: str, only_check: bool) -> int:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meet(rank, size, rendezvous, device)
    faults = sum(check(rank, size, device, kind) for kind in (torch.float32, torch.bfloat16))
    if rank == 0:
        print(f"{size} ranks: {f'{faults} faults' if faults else 'both exchanges are right'}")
    if faults or only_check or device.type == "cpu":
        return int(bool(faults))
    for graph in (True, False):
        if rank == 0:
            print(f"{'in graphs' if graph else 'without':>10} rows   gather us  to ranks us")
        for rows in FEW_ROWS if graph else MANY_ROWS:
            found = [microseconds(rank, size, device, rows, way, graph) for way in (False, True)]
            if rank == 0:
                print(f"{rows:>15}{found[0]:>12.1f}{found[1]:>13.1f}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous", default="")
    options = parser.parse_args()
    if options.rank is not None:
        with torch.inference_mode():
            status = run_rank(options.rank, options.size, options.rendezvous, options.check)
        sys.stdout.flush()
        os._exit(status)  # communicators that other ranks have left may never finish
    return run_ranks(__file__, options.size)


if __name__ == "__main__":
    sys.exit(main())
