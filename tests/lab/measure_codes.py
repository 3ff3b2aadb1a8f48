"""Prints how fast fp8 layers are with 8-bit activations: `Codes` beside today's kernel and torch's.

    PYTHONPATH=.src python tests/lab/measure_codes.py OUT.json [--seconds 95] [--compile-only]
        [--rows 8,32,...] [--formats fp8,blocks] [--forms codes,roles] [--jobs 16]

It compiles all candidates in parallel processes, and meanwhile touches no GPU; `--compile-only`
ends there, and needs no GPU. Then, for the four layers of Llama 8B with scales of rows ("fp8") and
of Qwen3 8B with scales of blocks ("blocks"), and for each number of rows, it measures single
kernels in CUDA graphs over copies of the weights that do not fit the cache:

- the kernel that was chosen before, with activations in 16 bits as its input, quantising them
  itself where it is torch's (`before`);
- `torch._scaled_mm` alone, of rows that are quantised already, with its plain output (`torch`);
- torch's product with weights in bf16, alone (`bf16`);
- with more than 256 rows, torch's product in a step (`around`): a gated layer then has a second
  kernel that gates and codes, and o a first one that codes; and its product with a copy of the
  weight in 16 bits, which it takes where it knows no product of codes (`copy`);
- each candidate of `Codes`, of the kernel without roles (`codes`) and with them (`roles`), as
  `codes_candidates` lists them; the fastest of each is printed, and after it the share that the
  weight's bytes at 4.2 TB/s have of its time. Inputs are coded already, except those of o, and of
  down with a scale for each row, which have no kernel before them that can code them so. A gated
  layer with tiles of 128 weight rows codes its output, and the time of a kernel that codes counts
  for others. The next kernel's time to read parts counts as well.

Each result is compared with the product of the same codes in float32, and with that of numbers that
are not rounded; a candidate that is wrong is named and left out. A second table has the norm with
and without codes. OUT.json has every figure and is written after each layer; the last lines are
entries for `kernels/packed/coded_choice.py`. After `--seconds` it stops and prints what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import linear_tune
import torch
from codes_candidates import FORMS, candidates
from codes_torch import (
    layer_by_torch,
    torch_us,
    wide_us,
)
from measure_packed import copy_of, exact_result, layer_call, random_packed, tile_on_meta
from torch import Tensor

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.device import Card
from slipstream.kernels.linear.linear_choice import Shape, bucket_of
from slipstream.kernels.linear.norm_rope import fused_add_rms_norm
from slipstream.kernels.packed import choice as packed_choice
from slipstream.kernels.packed.coded import Coding, code_rows, decode_rows, norm_and_code
from slipstream.kernels.packed.coded_linear import coding_of
from slipstream.kernels.packed.kinds import Codes, PackedChoice, has_groups
from slipstream.kernels.packed.linear import (
    choose_packed,
    packed_gated_linear,
    packed_linear_parts,
)
from slipstream.kernels.quant.tiled import TiledWeight, tile

BF16 = torch.bfloat16
NAMES = {"fp8": "fp8", "blocks": "fp8b"}  # names of `measure_packed`
ASKS: Any = {"fp8": "fp8-token", "blocks": "fp8-block"}
SHAPES = {
    "fp8": (
        Shape("gate_up", 28672, 4096),
        Shape("down", 4096, 14336),
        Shape("qkv", 6144, 4096),
        Shape("o", 4096, 4096),
    ),
    "blocks": (
        Shape("gate_up", 24576, 4096),
        Shape("down", 4096, 12288),
        Shape("qkv", 6144, 4096),
        Shape("o", 4096, 4096),
    ),
}
ROWS = (32, 8, 64, 128, 256, 16)  # the most important first
# bytes a microsecond at which the next kernel, a program for each row, reads parts out of L2: of
# all rows, and of one, for which the multiprocessor's 64 bytes a cycle are the limit
PARTS_RATE, ROW_RATE = 3e6, 1e5


def run(shape: Shape, choice: Codes, coded: Tensor, weight: TiledWeight) -> Tensor:
    """The layer with an input that is coded already."""
    if shape.role == "gate_up":
        out = Coding(shape.outputs // 2, True) if choice.block_n == 128 else None
        return packed_gated_linear(coded, weight, None, "silu", choice, None, BF16, out)
    return packed_linear_parts(coded, weight, None, choice, None, BF16)


def numbers(shape: Shape, out: Tensor) -> Tensor:
    """What a layer's output stands for, [M, outputs] float32."""
    if out.dtype == torch.uint8:
        return decode_rows(out, Coding(shape.outputs // 2, True))
    return (out.sum(0) if out.dim() == 3 else out).float()


def before(weight: TiledWeight, shape: Shape, rows: int) -> PackedChoice:
    """The kernel without codes."""
    with patch.object(packed_choice, "choose_coded", lambda *rest: None):
        return choose_packed(weight, shape.role, rows)


def compiler(args: argparse.Namespace, name: str) -> int:
    """Start a process that compiles a format's kernels, since compiling replaces Triton's driver;
    before this process touches the GPU or between its calls. Returns its id."""
    process = os.fork()
    if process == 0:
        args.formats = [name]
        compile_all(args)
        os._exit(0)
    return process


def cases(args: argparse.Namespace) -> Iterator[tuple[int, str, Shape]]:
    for name in args.formats:
        for rows in args.rows:
            for shape in SHAPES[name]:
                yield rows, name, shape


def compile_all(args: argparse.Namespace) -> None:
    """Compile every candidate, in parallel processes, without a GPU."""
    began, meta, seen = time.monotonic(), torch.device("meta"), set()
    card = Card("NVIDIA H200", (9, 0), 132)
    with without_gpu(card), compiling_only(ForkingExecutor(args.jobs)) as kernels:
        for rows, name, shape in cases(args):
            weight = replace(tile_on_meta(NAMES[name], shape), activations=ASKS[name])
            x = torch.empty(rows, shape.inputs, dtype=BF16, device=meta)
            own = before(weight, shape, rows)
            key: tuple[Any, ...] = (name, own, shape.inputs, shape.role)
            if key not in seen:
                seen.add(key)
                layer_call(shape, own, x, weight)
            for choice in candidates(name, shape, rows, args.forms):
                mode = "parts" if choice.split_k > 1 else shape.role
                key = name, replace(choice, split_k=1), mode, shape.outputs
                if key not in seen:
                    seen.add(key)
                    coded = torch.empty(
                        rows, coding_of(weight, choice).row_bytes, dtype=torch.uint8, device=meta
                    )
                    run(shape, choice, coded, weight)
            if rows > 256:
                by_group = has_groups(weight)
                layer_by_torch(shape, code_rows(x, Coding(shape.inputs, by_group, True)), weight)
            for by_group in (False, True):
                coding = Coding(shape.inputs, by_group)
                code_rows(x, coding)
                if shape.role in ("gate_up", "qkv"):
                    for parts in (None, 4):
                        of = x if parts is None else x.new_empty(parts, *x.shape).float()
                        norm_and_code(of, x, x[0], 1e-5, coding)
                        fused_add_rms_norm(of, x, x[0], 1e-5)
    failed = [key for key, kernel in kernels.items() if kernel.future.exception() is not None]
    took = time.monotonic() - began
    print(f"compiled {len(kernels)} kernels in {took:.0f} s, {len(failed)} failed", flush=True)


class Measurement:
    """Measures layers until the deadline, and keeps the figures."""

    def __init__(self, out: Path, deadline: float, forms: list[str]) -> None:
        self.forms = forms
        self.out, self.deadline, self.device = out, deadline, torch.device("cuda", 0)
        card = torch.cuda.get_device_name(0)
        self.figures: dict[str, Any] = {"card": card, "layers": [], "norms": []}
        self.coding: dict[tuple[int, int], float] = {}
        self.dense: dict[Shape, list[Tensor]] = {}  # weights in bf16
        self.found: dict[tuple[str, Shape, int], dict[int, dict[Codes, float]]] = {}
        self.others: dict[tuple[str, Shape, int], dict[int, float]] = {}

    def coding_us(self, rows: int, columns: int) -> float:
        """Microseconds of a kernel that codes rows of a layer's input."""
        if (rows, columns) not in self.coding:
            x = torch.randn(rows, columns, device=self.device, dtype=BF16)
            calls = [partial(code_rows, x, Coding(columns, True))] * 32
            self.coding[rows, columns] = linear_tune.time_in_graph(calls)
        return self.coding[rows, columns]

    def layer(self, rows: int, name: str, shape: Shape) -> None:
        packed = replace(random_packed(NAMES[name], shape, self.device), activations=ASKS[name])
        weight = tile(packed)
        x = torch.randn(rows, shape.inputs, device=self.device, dtype=BF16)
        exact = exact_result(shape, x, packed)
        copies = [weight]
        while len(copies) * weight.nbytes < linear_tune.COLD_BYTES:
            copies.append(copy_of(weight))
        own = before(weight, shape, rows)
        line: dict[str, Any] = {
            "format": name, "layer": f"{shape.role} {shape.outputs}x{shape.inputs}", "rows": rows,
            "us at 4.2 TB/s": weight.nbytes / 4.2e6, "before": str(own), "found": [],
        }  # fmt: skip
        before_us, error = self.timed(shape, copies, exact, partial(layer_call, shape, own, x))
        after = 0.0
        if shape.role == "o":
            after = self.coding_us(rows, shape.inputs)
        line["before us"], line["before error"] = before_us, error
        line["torch us"] = torch_us(name, shape, x, copies)
        if rows > 256:
            line |= wide_us(shape, x, copies)
        line["bf16 us"] = self.bf16_us(shape, x)
        key = name, shape, bucket_of(rows) or rows
        found = self.found.setdefault(key, {}).setdefault(rows, {})
        if before_us is not None:
            before_us = line.get("around", before_us)
            self.others.setdefault(key, {})[rows] = before_us + parts_us(own, shape, rows)
        for choice in candidates(name, shape, rows, self.forms):
            if time.monotonic() > self.deadline:
                break
            coding = coding_of(weight, choice)
            coded = code_rows(x, coding)
            rounded = replace(packed, activations="16bit")
            if "codes" not in line or line["codes"] != choice.by_group:
                line["codes"] = choice.by_group
                of_codes = exact_result(shape, decode_rows(coded, coding), rounded)
            us, error = self.timed(
                shape, copies, of_codes, partial(run_late, shape, choice, coded), exact
            )
            if us is None:
                print(f"  {line['layer']} {rows} rows: {choice} is wrong: {error}", flush=True)
                continue
            if shape.role == "gate_up" and choice.block_n != 128:
                us += self.coding_us(rows, shape.outputs // 2)
            if shape.role == "down" and not choice.by_group:  # no kernel before it codes so
                us += self.coding_us(rows, shape.inputs)
            us += after + parts_us(choice, shape, rows)
            found[choice] = us
            line["found"].append([us, error, *astuple(choice)])
        line["found"].sort()
        self.figures["layers"].append(line)
        least = line["us at 4.2 TB/s"]
        print(
            f"{name:6} {line['layer']:18} {rows:3}  bytes {least:5.1f}  bf16 {line['bf16 us']:5.1f}"
            f"  before {before_us or 0:5.1f}  torch {line['torch us'] or 0:5.1f}",
            *(f" {key} {line[key]:.1f}" for key in ("around", "copy") if key in line),
            *(summary(form, line["found"], least) for form in self.forms),
            flush=True,
        )
        self.save()

    def timed(
        self,
        shape: Shape,
        copies: list[TiledWeight],
        exact: Tensor,
        call: Callable[[TiledWeight], Tensor],
        unrounded: Tensor | None = None,
    ) -> tuple[float | None, float | str]:
        """Microseconds of a call, and its relative error against `unrounded` or `exact`; no time if
        it differs from `exact`, in which coded outputs may be off by their own rounding."""
        try:
            got = call(copies[0])
            limit = 0.06 if unrounded is None else 0.045 if got.dtype == torch.uint8 else 0.01
            value = numbers(shape, got)
            error = float((value - exact).norm() / exact.norm())
            if not error < limit:
                return None, f"relative error {error:.1e}"
            if unrounded is not None:
                error = float((value - unrounded).norm() / unrounded.norm())
            calls: list[Callable[[], object]] = [partial(call, copy) for copy in copies]
            calls *= -(-linear_tune.MIN_CALLS // len(calls))
            return linear_tune.time_in_graph(calls, repeats=3), error
        except Exception as problem:  # a lab script: name it and go on
            return None, f"{type(problem).__name__}: {problem}"

    def bf16_us(self, shape: Shape, x: Tensor) -> float:
        """Microseconds of torch's product alone with weights of 16 bits."""
        if shape not in self.dense:
            size = shape.outputs, shape.inputs
            count = -(-linear_tune.COLD_BYTES // (2 * shape.outputs * shape.inputs))
            self.dense = {
                shape: [torch.randn(size, device=self.device, dtype=BF16) for _ in range(count)]
            }
        calls: list[Callable[[], object]] = [
            partial(torch.nn.functional.linear, x, weight) for weight in self.dense[shape]
        ]
        calls *= -(-linear_tune.MIN_CALLS // len(calls))
        return linear_tune.time_in_graph(calls, repeats=3)

    def norms(self, rows: int) -> None:
        """The norm that sums parts, with numbers and with codes as its output."""
        x = torch.randn(rows, 4096, device=self.device, dtype=BF16)
        for parts in (None, 4):
            of = x if parts is None else torch.randn(parts, rows, 4096, device=self.device)
            plain = linear_tune.time_in_graph([partial(fused_add_rms_norm, of, x, x[0], 1e-5)] * 32)
            line: list[Any] = [rows, parts, plain]
            for by_group in (False, True):
                coding = Coding(4096, by_group)
                calls = [partial(norm_and_code, of, x, x[0], 1e-5, coding)] * 32
                line.append(linear_tune.time_in_graph(calls))
            self.figures["norms"].append(line)
            print("norm: rows, parts, us, us with codes, with groups:", line, flush=True)

    def save(self) -> None:
        self.out.write_text(json.dumps(self.figures, indent=1))

    def entries(self) -> None:
        """Print the fastest kernels as entries of the table; None where another is faster."""
        for key, by_rows in self.found.items():
            (name, shape, bucket), others = key, self.others.get(key, {})
            shared = set.intersection(*(set(found) for found in by_rows.values()))
            if not shared:  # more than 256 rows
                continue
            total = {c: sum(found[c] for found in by_rows.values()) for c in shared}
            best = min(total, key=lambda choice: total[choice])
            other = sum(others[rows] for rows in by_rows if rows in others)
            wins = len(others) < len(by_rows) or total[best] < other
            table = "fp8 blocks" if name == "blocks" else name
            entry = repr(best) if wins else "None"
            print(f'    ("{table}", {shape}, {bucket}): {entry},  # {total[best]:.1f}, {other:.1f}')


def summary(form: str, found: list[list[Any]], least: float) -> str:
    """The fastest candidate of a form: microseconds, share of bytes' time, error, its fields."""
    own = [each for each in found if Codes(*each[2:]).roles == (form == "roles")]
    if not own:
        return f" {form}: none"
    us, error, *fields = own[0]
    return f" {form} {us:5.1f} {least / us:4.0%} {error:.4f} {tuple(map(int, fields))}"


def run_late(shape: Shape, choice: Codes, coded: Tensor, weight: TiledWeight) -> Tensor:
    return run(shape, choice, coded, weight)


def parts_us(choice: PackedChoice, shape: Shape, rows: int) -> float:
    """What it costs the next kernel to read parts instead of one output in 16 bits."""
    split_k = getattr(choice, "split_k", 1) if shape.may_split else 1
    size = 2 if getattr(choice, "narrow", 0) else 4
    rate = min(PARTS_RATE, rows * ROW_RATE)
    return 0.0 if split_k == 1 else (size * split_k - 2) * rows * shape.outputs / rate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--formats", type=lambda t: t.split(","), default=["fp8", "blocks"])
    parser.add_argument("--rows", type=lambda t: [int(n) for n in t.split(",")], default=ROWS)
    parser.add_argument("--forms", type=lambda t: t.split(","), default=list(FORMS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    began = time.monotonic()
    if args.compile_only:
        compile_all(args)
        return
    compilers = {name: compiler(args, name) for name in args.formats[:1]}
    os.waitpid(compilers[args.formats[0]], 0)
    compilers |= {name: compiler(args, name) for name in args.formats[1:]}  # while it measures
    measurement = Measurement(args.out, began + args.seconds, args.forms)
    with torch.inference_mode():
        for rows in args.rows if min(args.rows) > 256 else (8, 64, 256):
            measurement.norms(rows)
        for case in cases(args):
            if time.monotonic() > measurement.deadline:
                print("out of time", flush=True)
                break
            if (process := compilers.pop(case[1], None)) is not None and case[1] != args.formats[0]:
                os.waitpid(process, 0)
            measurement.layer(*case)
    measurement.save()
    measurement.entries()
    for process in compilers.values():  # of a format that was not reached
        os.kill(process, signal.SIGTERM)
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
