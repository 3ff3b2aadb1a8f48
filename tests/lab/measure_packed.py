"""Prints how fast the linear kernels for quantised weights are on this GPU, beside bf16's.

    PYTHONPATH=.src python tests/lab/measure_packed.py OUT.json [--seconds 200] [--compile-only]
        [--save] [--kinds fp8,int4] [--rows 1,16]

It first compiles all candidates in parallel processes, without the GPU; `--compile-only` ends
there, and needs no GPU. Then it measures each format, shape and number of rows, as `linear_tune`
does: in a CUDA graph over copies of the weights that do not fit the cache. A candidate with a
wrong result is left out and named. After `--seconds` it stops. OUT.json has every figure; it is
written after each number of rows, so nothing is lost. `--save` keeps the fastest on disk, where
the server finds them.

A line: layer, rows, microseconds of cuBLAS and of our kernel with bf16, then for each format the
fastest candidate, its GB/s (codes and scales) and how many times faster than our bf16 it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import linear_tune
import torch
from torch import Tensor

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.device import Card
from slipstream.kernels.linear.linear_choice import H100_WINNERS, Gemv, Shape, Skinny
from slipstream.kernels.packed.kinds import (
    SMALL_GROUPS,
    Direct,
    PackedChoice,
    Quantised,
    Row,
    format_name,
)
from slipstream.kernels.packed.linear import (
    packed_gated_linear,
    packed_linear,
    packed_linear_parts,
)
from slipstream.kernels.packed.tuned import Key, save_choices
from slipstream.kernels.quant.packed import HIGH_BITS, Kind, PackedWeight
from slipstream.kernels.quant.tiled import TiledWeight, slices_of, tile

BF16 = torch.bfloat16
SHAPES = (
    Shape("gate_up", 28672, 4096),
    Shape("down", 4096, 14336),
    Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096),
    Shape("head", 128256, 4096),
)
ROWS = (1, 16, 64, 32, 128, 256)  # the most important first
# kind, group (0 = whole rows), row group, dtype of scales, zeros
FORMATS: dict[str, tuple[Kind, int, int, torch.dtype, bool]] = {
    "fp8": ("fp8", 0, 1, torch.float32, False),
    "int4": ("int4", 128, 1, BF16, False),
    "int4z": ("int4", 128, 1, torch.float16, True),
    "fp8b": ("fp8", 128, 128, torch.float32, False),
    "int8": ("int8", 0, 1, BF16, False),
    "q4_0": ("int4", 32, 1, torch.float16, False),
    "q4_1": ("int4", 32, 1, torch.float16, False),
    "q5_0": ("int5", 32, 1, torch.float16, False),
    "q5_1": ("int5", 32, 1, torch.float16, False),
    "q8_0": ("int8", 32, 1, torch.float16, False),
    "q4k": ("int4", 32, 1, torch.uint8, False),
    "q5k": ("int5", 32, 1, torch.uint8, False),
    "q6k": ("int6", 16, 1, torch.int8, False),
    "q5k8": ("int8", 32, 1, torch.uint8, False),  # in 8 bits, as before there were two planes
    "q6k8": ("int8", 16, 1, torch.int8, False),
    "mxfp4": ("fp4", 32, 1, torch.uint8, False),
    "nvfp4": ("fp4", 16, 1, torch.float8_e4m3fn, False),
}
GGUF = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4k", "q5k", "q6k")
WITH_OFFSETS = ("q4_1", "q5_1", "q4k", "q5k", "q5k8")  # GGUF's types with minima
TWO_LEVELS = ("q4k", "q5k", "q6k", "q5k8", "q6k8")  # with super scales of 256 columns
_DEVIATION = {"fp8": 1.0, "int8": 73.0, "int4": 4.6, "int5": 9.2, "int6": 18.5, "fp4": 3.0}
BONUS = 0.8  # microseconds that half a kernel less is worth
HEAD_FORMATS, HEAD_ROWS = ("fp8", "int4"), (1, 16, 64)  # with a head, and all tiles
# rows, block_k, warps, stages, norm, chunks in flight
GEMVS = ((4, 1024, 4, 0, 1, 1), (4, 1024, 4, 0, 1, 3), (2, 1024, 4, 0, 1, 2), (8, 1024, 4, 0, 1, 2))
# block_n, stages, warps, spans of a step
ROW_TILES = ((16, 3, 4, 4), (16, 5, 4, 4), (16, 3, 8, 8), (16, 4, 2, 2), (32, 3, 4, 4))
DIRECT_TILES = ((1, 4, 2), (1, 8, 1), (2, 4, 1), (1, 2, 2))  # tiles, warps, steps ahead
# (block_n, stages, warps) by rows of a program
TILES = {
    8: ((64, 4, 4), (64, 6, 4), (128, 4, 4)),
    16: ((64, 4, 4), (128, 3, 4), (64, 6, 4), (128, 4, 8), (32, 4, 2)),
    32: ((64, 4, 4), (128, 3, 4), (128, 4, 8)),
    64: ((64, 3, 4), (128, 3, 8), (64, 4, 4)),
    128: ((128, 3, 8), (64, 3, 4)),
    256: ((128, 3, 8), (64, 3, 4)),
}


def candidates(name: str, shape: Shape, rows: int) -> Iterator[PackedChoice]:
    """The kernels worth measuring."""
    kind, group, *_ = FORMATS[name]
    if rows == 1 and kind in ("fp8", "int8") and group in (0, 128):
        yield from (Gemv(*sizes) for sizes in GEMVS)
    columns = min(16 if kind in HIGH_BITS else 64, group or 64) * slices_of(kind)
    if rows <= 16 and (group in (0, 64, 128) or kind == "fp4"):
        for block_n, stages, warps, spans in ROW_TILES:
            for split_k in (1, 2) if shape.may_split else (1,):
                yield Row(block_n, stages, warps, split_k, spans, int(rows == 1))
    small = (kind, group) in SMALL_GROUPS
    if rows == 1 and small:
        for warps, ahead in ((4, 1), (4, 2), (8, 1), (2, 2)):
            for split_k in (1, 2) if shape.may_split else (1,):
                yield Direct(1, warps, ahead, split_k)
    if 1 < rows <= 16 and small and name not in ("q5k8", "q6k8"):
        for tiles, warps in ((1, 4), (2, 4), (1, 8), (1, 2)):
            for split_k in (1, 2, 4) if shape.may_split else (1,):
                yield Direct(tiles, warps, 1, split_k, norm=0)
    if rows == 1 and group in (0, 64, 128) and kind != "fp4":
        for tiles, warps, ahead in DIRECT_TILES:
            for split_k in (1, 2) if shape.may_split else (1,):
                yield Direct(tiles, warps, ahead, split_k)
    tall = (64, 128, 256) if kind in ("fp8", "int8") and not group else (64, 128)
    heights = {1: (8, 16), 128: (64, 128), 256: tall}.get(rows, (rows,))
    for height in heights:
        for block_n, stages, warps in TILES[height][: 5 if name in HEAD_FORMATS else 2]:
            if shape.role == "gate_up" and height == 64 and stages > 3:
                continue
            if small and shape.role == "gate_up" and height > 16:
                warps = 8  # which the registers need, see `choice._skinny`
            if shape.role == "gate_up" and height >= 128 and columns == 256:
                stages = 2  # as much as shared memory holds
            tiles = -(-shape.outputs // block_n) * max(1, rows // height)
            for split_k in (1, 2, 4, 8) if shape.may_split else (1,):
                if split_k == 1 or (
                    130 <= tiles * split_k <= 600 and shape.inputs >= 4 * split_k * columns
                ):
                    if shape.may_split and split_k == 1 and tiles < 64:
                        continue
                    yield Skinny(block_n, columns, stages, warps, split_k, height)
    if rows >= 128:
        yield None  # a copy in bf16, and cuBLAS
        if name in ("fp8", "fp8b", "int8"):
            yield Quantised()


def random_packed(name: str, shape: Shape, device: torch.device) -> PackedWeight:
    """Random codes and scales, on the meta device without values."""
    kind, group, row_group, dtype, has_zeros = FORMATS[name]
    rows, columns = shape.outputs, shape.inputs
    group = group or columns
    grid = (-(-rows // row_group), -(-columns // group))
    if kind == "fp8":
        values = torch.empty(rows, columns, device=device, dtype=BF16).normal_()
        values = values.to(torch.float8_e4m3fn)
    elif kind == "int8":
        values = torch.randint(-127, 128, (rows, columns), device=device, dtype=torch.int8)
    else:
        values = torch.randint(0, 256, (rows, columns // 2), device=device, dtype=torch.uint8)
    spread = _DEVIATION[kind] * columns**0.5
    supers = (rows, -(-columns // 256))
    if name in TWO_LEVELS:
        scales = torch.randint(16, 48, grid, device=device).to(dtype)
    elif dtype == torch.uint8:
        scales = torch.randint(117, 122, grid, device=device, dtype=torch.uint8)
    else:
        wide = torch.empty(grid, device=device).uniform_(0.5, 1.5)
        scales = (wide if name == "nvfp4" else wide / spread).to(dtype)
    own: dict[str, Any] = {}
    if kind in HIGH_BITS:
        size = rows, columns * HIGH_BITS[kind] // 8
        own["high"] = torch.randint(0, 256, size, device=device, dtype=torch.uint8)
    if has_zeros:
        own["zeros"] = torch.randint(0, 17, grid, device=device, dtype=torch.uint8)
    if name in TWO_LEVELS:
        own["super_scales"] = torch.full(supers, 1 / spread / 32, device=device).half()
    if name in WITH_OFFSETS and name not in TWO_LEVELS:
        own["offsets"] = torch.full(grid, -1 / columns**0.5, device=device).half()
    elif name in WITH_OFFSETS:
        own["offsets"] = torch.randint(0, 64, grid, device=device).to(dtype)
        own["super_offsets"] = torch.full(supers, -0.03 / columns**0.5, device=device).half()
    if name == "nvfp4":
        own["global_scale"] = torch.full((rows,), 1 / spread, device=device)
    return PackedWeight(kind, values, scales, columns, group, row_group, **own)


def copy_of(weight: TiledWeight) -> TiledWeight:
    """The same weight at other addresses."""
    own = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(weight, **{k: v.clone() for k, v in own.items() if isinstance(v, Tensor)})


def layer_call(shape: Shape, choice: PackedChoice, x: Tensor, weight: TiledWeight) -> Tensor:
    """Run this layer as a model does, but without its norm; x: [M, K]."""
    if shape.role == "gate_up":
        return packed_gated_linear(x, weight, None, "silu", choice)
    if shape.may_split:
        return packed_linear_parts(x, weight, None, choice)
    return packed_linear(x, weight, None, choice)


def exact_result(shape: Shape, x: Tensor, weight: PackedWeight) -> Tensor:
    """The layer in float32, in pieces of rows."""
    pieces = []
    for start in range(0, shape.outputs, 8192):
        ids = torch.arange(start, min(start + 8192, shape.outputs), device=x.device)
        pieces.append(x.float() @ weight.rows(ids).T)
    out = torch.cat(pieces, 1)
    if shape.role == "gate_up":
        gate, up = out.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return out


def cases(args: argparse.Namespace) -> Iterator[tuple[int, Shape, str]]:
    for rows in args.rows:
        for shape in SHAPES:
            for name in args.kinds:
                if shape.role != "head" or (name in HEAD_FORMATS and rows in HEAD_ROWS):
                    yield rows, shape, name


def compile_all(args: argparse.Namespace) -> None:
    """Compile every candidate, in parallel processes, without a GPU."""
    card = Card("NVIDIA H200", (9, 0), 132)
    began, meta = time.monotonic(), torch.device("meta")
    seen: set[Any] = set()
    with without_gpu(card), compiling_only(ForkingExecutor(args.jobs)) as kernels:
        for rows, shape, name in cases(args):
            weight = tile_on_meta(name, shape)
            x = torch.empty(rows, shape.inputs, dtype=BF16, device=meta)
            for choice in candidates(name, shape, rows):
                mode = "parts" if shape.may_split else shape.role
                key: tuple[Any, ...] = (name, choice, shape.inputs, mode)
                if isinstance(choice, Skinny | Row):  # compiled for all sizes and splits
                    key = (name, replace(choice, split_k=1), mode)
                if key not in seen and not isinstance(choice, Quantised):
                    seen.add(key)
                    layer_call(shape, choice, x, weight)
    failed = [key for key, kernel in kernels.items() if kernel.future.exception() is not None]
    took = time.monotonic() - began
    print(f"compiled {len(kernels)} kernels in {took:.0f} s, {len(failed)} failed", flush=True)


def tile_on_meta(name: str, shape: Shape) -> TiledWeight:
    return tile(random_packed(name, shape, torch.device("meta")))


def saves_a_kernel(shape: Shape, choice: PackedChoice) -> bool:
    """Whether a choice applies the norm before the layer, or adds the residual after it."""
    if shape.role in ("qkv", "gate_up"):
        return choice is not None and bool(choice.norm)
    return isinstance(choice, Gemv) or (isinstance(choice, Row | Direct) and choice.split_k == 1)


class Measurement:
    """Measures cases until the deadline, and keeps the figures."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out, self.deadline = out, deadline
        self.device = torch.device("cuda", 0)
        self.figures: dict[str, Any] = {"card": torch.cuda.get_device_name(0), "cases": []}
        self.winners: dict[Key, PackedChoice] = {}
        self.bf16: dict[tuple[Shape, int], tuple[float, float]] = {}

    def dense(self, shape: Shape, rows: int) -> tuple[float, float]:
        """Microseconds of (cuBLAS, our kernel) with bf16 weights."""
        if (shape, rows) not in self.bf16:
            ours = H100_WINNERS.get((shape, rows))
            timed = linear_tune.measure(shape, rows, [None, ours], self.device, BF16)
            times = {choice: us for us, choice in timed}
            self.bf16[shape, rows] = times[None], times.get(ours, float("nan"))
        return self.bf16[shape, rows]

    def run(self, rows: int, shape: Shape, name: str) -> None:
        cublas, ours = self.dense(shape, rows)
        packed = random_packed(name, shape, self.device)
        weight = tile(packed)
        x = torch.empty(rows, shape.inputs, device=self.device, dtype=BF16).normal_()
        exact = exact_result(shape, x, packed)
        del packed
        nbytes = weight.nbytes
        copies = [weight]
        while len(copies) * nbytes < linear_tune.COLD_BYTES:
            copies.append(copy_of(weight))
        found: list[tuple[float, float, PackedChoice]] = []
        for choice in candidates(name, shape, rows):
            if time.monotonic() > self.deadline:
                break
            try:
                got = layer_call(shape, choice, x, weight)
                got = got.sum(0) if got.dim() == 3 else got
                error = float((got.float() - exact).norm() / exact.norm())
                if not error < (0.05 if isinstance(choice, Quantised) else linear_tune.TOLERANCE):
                    raise ArithmeticError(f"relative error {error:.1e}")
                calls: list[Callable[[], object]] = [
                    partial(layer_call, shape, choice, x, copy) for copy in copies
                ]
                calls *= -(-linear_tune.MIN_CALLS // len(calls))
                found.append((linear_tune.time_in_graph(calls), error, choice))
            except Exception as problem:  # a lab script: name it and go on
                print(f"  {name} {shape} {rows} rows: {choice} failed: {problem}", flush=True)
        found.sort(key=lambda item: item[0])
        self.figures["cases"].append(
            {
                "format": name,
                "layer": f"{shape.role} {shape.outputs}x{shape.inputs}",
                "rows": rows,
                "cublas_bf16_us": cublas,
                "ours_bf16_us": ours,
                "bytes": nbytes,
                "found": [
                    [us, error, type(choice).__name__, *(astuple(choice) if choice else ())]
                    for us, error, choice in found
                ],
            }
        )
        if found:
            exact = [item for item in found if not isinstance(item[2], Quantised)]
            best = min(exact, key=lambda item: item[0] - BONUS * saves_a_kernel(shape, item[2]))
            self.winners.setdefault((format_name(weight), shape, rows), best[2])
            us, error, choice = found[0]
            dense = min(cublas, ours)
            print(
                f"{shape.role:8} {rows:4} {cublas:7.1f} {ours:7.1f}  {name:6} {us:7.1f} us "
                f"{nbytes / us / 1e3:6.0f} GB/s {dense / us:5.2f}x error {error:.4f} {choice}",
                flush=True,
            )

    def save(self) -> None:
        self.out.write_text(json.dumps(self.figures, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--rows", type=lambda t: [int(n) for n in t.split(",")], default=ROWS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    began = time.monotonic()
    logging.basicConfig(level=logging.WARNING)
    if args.compile_only:
        compile_all(args)
        return
    if os.fork() == 0:  # compiling replaces Triton's driver, so it has a process of its own
        compile_all(args)
        os._exit(0)
    os.wait()
    measurement = Measurement(args.out, began + args.seconds)
    with torch.inference_mode():
        for rows, shape, name in cases(args):
            if time.monotonic() > measurement.deadline:
                print("out of time", flush=True)
                break
            measurement.run(rows, shape, name)
            measurement.save()
    if args.save:
        print("saved", save_choices(measurement.device, measurement.winners))
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
