"""What the sums over tensor-parallel ranks take of a step: NCCL beside shared GPU memory.

    PYTHONPATH=.src python tests/lab/measure_allreduce.py [--size 2] [--groups 1] [--check]

With --groups the GPUs are divided into that many groups which add up apart and at the same time,
each by the name of a group of its own, as the engines of `-dp N -tp M` that share experts.

First it compares the results of all ways, eager and from CUDA graphs that are replayed with other
numbers; with --check it ends there. Then it prints the microseconds of one sum, by way and number
of rows of hidden size 4096 in bf16, from a graph of 65 sums that depend on each other: as many as a
step of Llama-8B has (two a layer and one of the embeddings). The last columns are those of a whole
step. Last it prints the same of gathers: of the best tokens of each rank's part of the vocabulary,
and of logits. Status 1 if results differ or ranks get different bits.

To read it: multiply by what a step takes (`bench offline -tp 2`) to get the share of the sums; the
server picks "packets" by `runner/parallel/packet_sums.py`, and "one_shot" or "two_shot" by
`small_sums.py` beside it; their limits should follow the crossing of the columns. "packets" also
adds up the parts of a split product and the residual, which these figures leave out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_scripts import run_ranks
from torch import Tensor

from slipstream.kernels.linear.packets.memory import packets_fit
from slipstream.runner.parallel.collectives import Collectives, meet, subgroup
from slipstream.runner.parallel.small_sums import way_of

HIDDEN, SUMS, REPEATS = 4096, 65, 20
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WAYS = ("nccl", "one_shot", "two_shot", "packets")
# Best tokens and their scores, and logits of halves of 32,000 and 128,256 tokens.
GATHERS = [((rows, 3), torch.float32) for rows in (1, 32, 256)]
GATHERS += [((rows, 16000), torch.bfloat16) for rows in (1, 8, 32)]
GATHERS += [((rows, 64128), torch.bfloat16) for rows in (1, 4)]
Adders = dict[str, Callable[[Tensor], Tensor]]


def adders_of(collectives: Collectives, group: Any) -> Adders:
    """The ways to add up that the GPUs have, by name."""
    small, packets = collectives._small, collectives.packets

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    found: Adders = {"nccl": nccl}
    if small is not None:
        found["one_shot"] = lambda x: small.by("one_shot", x)
        found["two_shot"] = lambda x: small.by("two_shot", x)
    if packets is not None:
        found["packets"] = lambda x: packets.sum(x, x.dtype)
    return found


def takes(way: str, rows: int, dtype: torch.dtype) -> bool:
    """Whether a way can add up so many rows."""
    if way == "packets":
        return packets_fit(rows, HIDDEN, dtype)
    return way == "nccl" or rows * HIDDEN * dtype.itemsize <= 4 << 20


def recorded(work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of `work`, and the tensor that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def check(rank: int, size: int, adders: Adders, device: torch.device, group: Any) -> int:
    """The number of ways whose results are wrong; prints each. `size` is that of the group."""
    faults = 0
    for dtype in (torch.bfloat16, torch.float32):
        for way in WAYS[1:]:
            for rows in (1, 3, 32, 128):
                if way not in adders or not takes(way, rows, dtype):
                    continue
                x, add = torch.empty(rows, HIDDEN, dtype=dtype, device=device), adders[way]

                def work(x: Tensor = x, add: Callable[[Tensor], Tensor] = add) -> Tensor:
                    return add(add(x) * 0.5)  # a second one right behind the first

                graph, out = recorded(work)
                for round in range(4):
                    torch.manual_seed(100 * round + rank)
                    x.copy_(torch.randn(rows, HIDDEN, device=device))
                    eager = work().clone()
                    graph.replay()
                    expected = x.float()
                    dist.all_reduce(expected, group=group)
                    expected = expected * (0.5 * size)
                    close = torch.allclose(out.float(), expected, rtol=2e-2, atol=5e-2 * size)
                    everyones = [torch.empty_like(out) for _ in range(size)]
                    dist.all_gather(everyones, out.contiguous(), group=group)
                    same = all(torch.equal(one, everyones[0]) for one in everyones)
                    if not (close and same and torch.equal(eager, out)):
                        faults += 1
                        print(
                            f"rank {rank}: {way} of {rows} rows in {dtype} is wrong: close {close},"
                            f" equal on all ranks {same}, eager equals graph"
                            f" {torch.equal(eager, out)}",
                            flush=True,
                        )
    return faults


def check_gathers(rank: int, collectives: Collectives, device: torch.device) -> int:
    """The number of gathers by packets that are wrong, sums between them; prints each."""
    packets, faults = collectives.packets, 0
    if packets is None:
        return 0
    for shape, dtype in GATHERS:
        x = torch.empty(shape, dtype=dtype, device=device)
        row = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=device)

        def work(x: Tensor = x, row: Tensor = row) -> Tensor:
            first = packets.gather(x)
            packets.sum(row, row.dtype)
            return torch.cat((first, packets.gather(x)))

        if not packets.gathers(x):
            continue
        graph, out = recorded(work)
        for round in range(4):
            torch.manual_seed(100 * round + rank)
            x.copy_(torch.randn(shape, device=device))
            eager, one = work().clone(), collectives.all_gather(x)
            graph.replay()
            if not (torch.equal(out, torch.cat((one, one))) and torch.equal(eager, out)):
                faults += 1
                print(f"rank {rank}: the gather of {shape} in {dtype} is wrong", flush=True)
    return faults


def measure_gathers(rank: int, collectives: Collectives, device: torch.device) -> None:
    """Print the microseconds of gathers by NCCL and by packets."""
    packets = collectives.packets
    ways = {"nccl": collectives.all_gather}
    if packets is not None:
        ways["packets"] = packets.gather
    for shape, dtype in GATHERS:
        x = torch.zeros(shape, dtype=dtype, device=device)
        fits = {way: one for way, one in ways.items() if way == "nccl" or packets.gathers(x)}
        found = {way: microseconds_of(lambda x, one=one: one(x)[0], x) for way, one in fits.items()}
        if rank == 0:
            times = ", ".join(f"{way} {time:.1f} us" for way, time in found.items())
            print(f"gather of {list(shape)} in {dtype}: {times}", flush=True)


def microseconds(add: Callable[[Tensor], Tensor], rows: int, device: torch.device) -> float:
    """Of one sum, from a graph of `SUMS`."""
    return microseconds_of(add, torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device))


def microseconds_of(add: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Of one exchange, from a graph of `SUMS` that follow each other, of x and then of the
    results."""

    def work() -> Tensor:
        out = x
        for _ in range(SUMS):
            out = add(out)
        return out

    graph, _ = recorded(work)
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / SUMS)
    return sorted(times)[len(times) // 2]


def run_rank(rank: int, size: int, groups: int | None, rendezvous: str, only_check: bool) -> int:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meet(rank, size, rendezvous, device)
    group: Any = None
    if groups is not None:
        size //= groups
        members = [range(first, first + size) for first in range(0, groups * size, size)]
        group = subgroup(members, rank)
    collectives = Collectives(size, device, group)
    collectives.use_small_sums()
    adders = adders_of(collectives, group)
    if len(adders) == 1:
        print(f"rank {rank}: the GPUs cannot share memory; see the warning above", flush=True)
        return 1
    faults = check(rank, size, adders, device, group) + check_gathers(rank, collectives, device)
    if rank == 0:
        print(f"{size} GPUs: {'all ways are right' if not faults else f'{faults} faults'}")
    if faults or only_check:
        return int(bool(faults))
    if rank == 0:
        print(f"{'rows':>5}{'KiB':>6}" + "".join(f"{way + ' us':>13}" for way in WAYS), end="")
        print("".join(f"{way + ' step us':>18}" for way in WAYS) + "  picked", flush=True)
    for rows in ROWS:
        num_bytes = rows * HIDDEN * 2
        found = {
            way: microseconds(adders[way], rows, device)
            for way in WAYS
            if way in adders and takes(way, rows, torch.bfloat16)
        }
        if rank == 0:
            line = f"{rows:>5}{num_bytes >> 10:>6}"
            line += "".join(f"{found.get(way, float('nan')):>13.1f}" for way in WAYS)
            line += "".join(f"{found.get(way, float('nan')) * SUMS:>18.0f}" for way in WAYS)
            packets = collectives.packets
            fit = packets is not None and packets.fit(rows, HIDDEN, torch.bfloat16)
            picked = "packets" if fit else way_of(size, num_bytes, torch.bfloat16)
            print(f"{line}  {picked}", flush=True)
    measure_gathers(rank, collectives, device)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--groups", type=int, help="which must divide --size")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous", default="")
    options = parser.parse_args()
    if options.rank is not None:
        args = (options.rank, options.size, options.groups, options.rendezvous)
        status = run_rank(*args, options.check)
        sys.stdout.flush()
        os._exit(status)  # communicators that other ranks have left may never finish
    return run_ranks(__file__, options.size)


if __name__ == "__main__":
    sys.exit(main())
