"""Measures linear kernels for the layers of many models, on all GPUs of the machine.

    PYTHONPATH=.src python tests/lab/measure_shapes.py OUT.jsonl [--seconds 60] [--only NAME ...]

Each line of OUT.jsonl has a layer's shape, a number of rows, and the microseconds of every kernel
that was tried, torch's (null) among them. First as many processes as there are cores compile the
kernels, then one process a GPU times its share of the shapes. The winners are also saved where
`--linear-backend auto` finds them. The rule for
unmeasured shapes in `linear_choice` is made from these lines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import torch
from linear_tune import best_of, layer_call, measure

from slipstream.kernels.linear.linear_choice import BUCKETS, Choice, Gemv, Shape, Skinny
from slipstream.kernels.linear.linear_tuned import card_name, save_tuned

BF16 = torch.bfloat16
# hidden, intermediate, outputs of qkv, inputs of o, vocabulary, numbers of ranks
MODELS = {
    "llama-8b": (4096, 14336, 6144, 4096, 128256, (2, 4)),
    "llama-70b": (8192, 28672, 10240, 8192, 128256, (2, 4, 8)),
    "qwen3-0.6b": (1024, 3072, 4096, 2048, 151936, (1,)),
    "qwen3-1.7b": (2048, 6144, 4096, 2048, 151936, (1,)),
    "qwen3-4b": (2560, 9728, 6144, 4096, 151936, (1,)),
    "qwen3-8b": (4096, 12288, 6144, 4096, 151936, (1, 2)),
    "qwen3-14b": (5120, 17408, 7168, 5120, 151936, (1, 2)),
    "qwen3-32b": (5120, 25600, 10240, 8192, 151936, (1, 2)),
    "qwen2.5-7b": (3584, 18944, 4608, 3584, 152064, (1,)),
    "gemma3-4b": (2560, 10240, 4096, 2048, 262208, (1,)),
    "gemma3-12b": (3840, 15360, 8192, 4096, 262208, (1,)),
    "gemma3-27b": (5376, 21504, 8192, 4096, 262208, (1,)),
    "qwen3-30b-a3b": (2048, 0, 5120, 4096, 151936, (1,)),
    "gpt-oss-20b": (2880, 0, 5120, 4096, 201088, (1,)),
}
_GEMVS = ((2, 2048, 4, 0, 1, 2), (4, 1024, 4, 0, 0), (4, 2048, 4), (2, 1024, 4), (4, 1024, 4))
_FEW = ((64, 128, 4, 4), (64, 256, 3, 4))
_MANY = ((64, 128, 5, 4), (64, 64, 4, 4), (64, 64, 5, 4))
_GATED = {16: ((64, 128, 3, 4), (64, 64, 5, 4)), 32: ((64, 128, 2, 4), (64, 64, 4, 4))}
_GATED_MANY = ((64, 64, 3, 4), (64, 64, 4, 8))
_HEADS = ((128, 128, 3, 4), (64, 256, 3, 4), (128, 64, 4, 4))


def shapes_of(only: list[str]) -> list[Shape]:
    """The shapes of the models, each once."""
    found: dict[Shape, None] = {}
    for name, (hidden, inner, qkv, attention, vocabulary, sizes) in MODELS.items():
        if only and name not in only:
            continue
        for size in sizes:
            found[Shape("qkv", qkv // size, hidden)] = None
            found[Shape("o", hidden, attention // size)] = None
            if inner:
                found[Shape("gate_up", 2 * inner // size, hidden)] = None
                found[Shape("down", hidden, inner // size)] = None
            found[Shape("head", vocabulary // size, hidden)] = None
    return list(found)


def choices_of(shape: Shape, rows: int) -> Iterator[Choice]:
    """The kernels to time for a layer of a bucket of rows."""
    yield None
    if rows == 1:
        yield from (Gemv(*sizes) for sizes in _GEMVS)
    block_m = max(16, rows)
    if shape.role == "gate_up":
        tiles = _GATED.get(block_m, _GATED_MANY)
        yield from (Skinny(*tile, 1, block_m) for tile in tiles)
        return
    if shape.role == "head":
        yield from (Skinny(*tile, 1, block_m) for tile in _HEADS)
        return
    for tile in _FEW if rows <= 32 else _MANY:
        programs = -(-shape.outputs // tile[0]) * max(1, rows // 256)
        splits = [s for s in (1, 2, 3, 4, 6, 8) if shape.inputs // s >= 2 * tile[1]]
        fitting = [s for s in splits if 96 <= programs * s <= 420] or [splits[-1]]
        for split in fitting[:3]:
            yield Skinny(*tile, split, block_m)


def kernels(shapes: list[Shape]) -> list[tuple[Shape, int, Choice]]:
    """One layer for each kernel that must be compiled."""
    found: dict[object, tuple[Shape, int, Choice]] = {}
    for shape in shapes:
        for rows in BUCKETS:
            for choice in choices_of(shape, rows):
                odd = shape.outputs % 16, shape.inputs % 16
                key = choice, shape.role == "gate_up", shape.may_split, odd, rows == 1
                if choice is not None and key not in found:
                    found[key] = shape, rows, choice
    return list(found.values())


def compile_share(device: int, shapes: list[Shape], share: int, shares: int) -> None:
    torch.cuda.set_device(device)
    for shape, rows, choice in kernels(shapes)[share::shares]:
        x = torch.zeros(rows, shape.inputs, dtype=BF16, device="cuda")
        weight = torch.zeros(shape.outputs, shape.inputs, dtype=BF16, device="cuda")
        try:
            layer_call(shape, choice, x, weight)
        except Exception as error:  # timing reports it
            print(f"{shape} {choice}: {error}"[:200], flush=True)


def time_share(
    device: int, shapes: list[Shape], share: int, shares: int, path: str, until: float
) -> None:
    torch.cuda.set_device(device)
    cuda = torch.device("cuda", device)
    winners = {}
    with Path(f"{path}.{share}").open("w") as file:
        for shape in shapes[share::shares]:
            for rows in BUCKETS:
                timed = measure(shape, rows, list(choices_of(shape, rows)), cuda, BF16, None, until)
                if time.monotonic() > until:
                    break
                winners[shape, rows] = best_of(timed)
                line = [
                    [
                        round(us, 2),
                        None if choice is None else [type(choice).__name__, *astuple(choice)],
                    ]
                    for us, choice in timed
                ]
                file.write(
                    json.dumps(
                        {
                            "role": shape.role,
                            "shape": [shape.outputs, shape.inputs],
                            "rows": rows,
                            "timed": line,
                        }
                    )
                    + "\n"
                )
                file.flush()
    save_tuned(card_name(cuda), BF16, winners)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    gpus, shapes = torch.cuda.device_count(), shapes_of(arguments.only)
    workers = max(1, (os.cpu_count() or 1) - 2)

    def run(target: object, argument_lists: list[tuple[object, ...]]) -> None:
        processes = [spawn.Process(target=target, args=args) for args in argument_lists]  # type: ignore[arg-type]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

    run(compile_share, [(n % gpus, shapes, n, workers) for n in range(workers)])
    print(
        f"{len(shapes)} shapes, {len(kernels(shapes))} kernels compiled in "
        f"{time.monotonic() - began:.1f} s",
        flush=True,
    )
    until = began + arguments.seconds
    run(time_share, [(n, shapes, n, gpus, arguments.out, until) for n in range(gpus)])
    with Path(arguments.out).open("w") as whole:
        for n in range(gpus):
            part = Path(f"{arguments.out}.{n}")
            whole.write(part.read_text())
            part.unlink()
    print(f"timed in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
