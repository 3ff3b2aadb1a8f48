"""Prints which kernels make a step with quantised weights fastest on this GPU.

    PYTHONPATH=.src python tests/lab/measure_packed_row.py [one] [many] [--kinds fp8,int4]
        [--seconds 100] [--compile-only]

`one` times a chain of layers of Llama 8B's shape for one request, in a CUDA graph with dependent
launches as in a real step: attention, norms, products. One kernel at a time differs from the
fastest chain so far, and a faster one replaces it, so that the last line is the best found. `many`
times single layers of int4 with 128, 256 and 64 rows. Weights together do not fit the cache. All
kernels are compiled first, in parallel processes and without the GPU; `--compile-only` ends there.
Both print the best choices as lines for the tables of `kernels.packed.choice`.

A line: microseconds of a layer, the difference to the fastest so far (* if faster), the relative
error against torch, and what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import measure_packed
import torch
from chain_step import BF16, FUNCTIONS, MAX_LEN, Step, planned, without
from chain_variants import MODELS
from linear_tune import fails_in_fork
from measure_chain import H200, Bench
from shapes import FP8_ROWS, GPTQ
from transformers import LlamaConfig

from slipstream.configs.model.quantisation import parse_quantisation
from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.linear.linear_choice import H100_WINNERS, Shape, Skinny
from slipstream.kernels.linear.linear_tuned import LinearChooser
from slipstream.kernels.packed.choice import _ONE_ROW, choose_packed
from slipstream.kernels.packed.kinds import Direct, PackedChoice, Row
from slipstream.kernels.packed.triton import packed_skinny
from slipstream.runner.loading.dummy import load_random
from slipstream.runner.models.formats import packed as formats
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model

LAYERS, CONTEXT = 6, 256
SHAPES = {shape.role: shape for shape in measure_packed.SHAPES}
TOLERANCE = 0.05  # relative error of hidden states after the chain
QUANTISED: Mapping[str, dict[str, Any] | None] = {"bf16": None, "fp8": FP8_ROWS, "int4": GPTQ}
Table = dict[str, Any]  # role -> choice; "attention" -> changes of its plan


def _rows(*sizes: tuple[int, ...]) -> list[PackedChoice]:
    return [Row(*of) for of in sizes]


def _direct(*sizes: tuple[int, ...]) -> list[PackedChoice]:
    return [Direct(*of) for of in sizes]


# tiles, warps, steps ahead, split, norm
_SMALL = ((1, 2, 2), (1, 4, 1), (1, 4, 2), (1, 4, 4), (1, 8, 1), (1, 8, 2), (2, 4, 1), (2, 4, 2))
ONE_ROW: Mapping[str, Mapping[str, list[PackedChoice]]] = {
    "int4": {
        "gate_up": [
            *_direct(*_SMALL, (1, 1, 2), (1, 2, 1), (1, 2, 4), (2, 2, 1), (2, 2, 2), (4, 4, 1)),
            *_rows((16, 3, 4, 1, 4), (16, 2, 4, 1, 8), (16, 3, 4, 1, 4, 0)),
        ],
        "down": [
            *_direct((1, 4, 1), (1, 4, 2), (1, 8, 1), (1, 8, 2), (2, 4, 1), (2, 8, 1)),
            *_direct((1, 4, 1, 2), (1, 4, 2, 2), (1, 4, 2, 4), (1, 8, 1, 2), (1, 2, 2, 4)),
            *_direct((2, 4, 1, 2), (2, 4, 2, 2), (2, 4, 1, 4), (1, 4, 4, 2)),
            *_rows((16, 5, 4, 2)),
        ],
        "o": [
            *_direct(*_SMALL, (1, 8, 1, 2), (1, 4, 2, 2)),
            *_rows((16, 2, 8, 1, 8)),
        ],
        "qkv": [*_direct(*_SMALL), *_rows((16, 2, 8, 1, 8))],
    },
    "fp8": {
        "gate_up": [
            *_direct(*_SMALL, (1, 1, 4), (1, 2, 4), (2, 2, 2), (1, 8, 4), (4, 4, 1), (4, 2, 1)),
            *_rows((16, 4, 2, 1, 2, 0), (16, 3, 4, 1, 4), (32, 3, 4, 1, 4)),
        ],
        "down": [
            *_direct((1, 4, 2), (1, 4, 4), (1, 8, 1), (1, 8, 2), (2, 4, 1), (2, 4, 2), (2, 8, 1)),
            *_direct((1, 4, 2, 2), (1, 4, 4, 2), (1, 8, 2, 2), (2, 4, 2, 2), (1, 4, 4, 4)),
            *_rows((32, 4, 8, 1, 8)),
        ],
        "o": [*_direct(*_SMALL, (1, 8, 4), (1, 4, 2, 2))],
        "qkv": [*_direct(*_SMALL, (1, 8, 4))],
    },
    "bf16": {},
}
EARLY = (0, 2, 4, 8, 12, 24)  # MiB prefetched by a `Row`
# Changes of the plan of attention.
ATTENTION: tuple[dict[str, Any], ...] = (
    {"last_sums": 4},
    {"last_sums": 4, "least_keys": 128, "alone": 128},
    {"last_sums": 4, "splits": 8},
    {"last_sums": 4, "splits": 4},
    {"splits": 8},
    {"splits": 4},
    {"early": False},
)
HEIGHTS = (64, 128)  # rows of a program in `many`; more do not fit shared memory
# block_n, stages, warps
TALL = ((64, 3, 4), (128, 3, 8), (128, 2, 8), (64, 2, 4))


# --- one request ---------------------------------------------------------------------------------


def make_step(kind: str, device: torch.device, layers: int = LAYERS, requests: int = 1) -> Step:
    """A step of a request, or of few, through a few layers in the format `kind`."""
    sizes = {**MODELS["Llama-8B"], "num_hidden_layers": layers, "max_position_embeddings": MAX_LEN}
    said = QUANTISED[kind]
    chooser = LinearChooser(H100_WINNERS)
    model = build_model(
        LlamaConfig(**sizes), WeightFormat(device, BF16, linear=chooser, packed=said is not None)
    )
    quantisation = None if said is None else parse_quantisation({"quantization_config": said})
    load_random(model.checkpoint_slots(), device, seed=1, quantisation=quantisation)
    return Step(model, requests, CONTEXT, device)


@contextmanager
def using(step: Step, table: Table) -> Iterator[None]:
    """Inside, the layers use the choices of a table; what it lacks is built in."""

    def choose(weight: Any, role: str, num_rows: int) -> PackedChoice:
        if "torch" in table:
            return None
        choice: PackedChoice = table.get(role, choose_packed(weight, role, num_rows))
        return choice

    with ExitStack() as stack:
        stack.enter_context(planned(table.get("attention", {})))
        stack.enter_context(patch.object(formats, "choose_packed", choose))
        for module in step.model.modules():
            if isinstance(module, formats.PackedLayer):
                module._chosen.clear()
        yield


class Search:
    """Times tables of choices, and keeps the fastest."""

    def __init__(self, bench: Bench, kind: str, deadline: float) -> None:
        self.bench, self.kind, self.deadline = bench, kind, deadline
        self.step = make_step(kind, bench.device)
        with using(self.step, {"torch": None} if kind != "bf16" else {}):
            self.exact = self.step.hidden()
        self.best: Table = {}
        self.fastest = float("inf")
        self.times: dict[str, list[tuple[float, PackedChoice]]] = {}  # of each role

    def attempt(self, **changes: Any) -> None:
        """Time the fastest table with these changes, and take it if it is faster."""
        if time.monotonic() > self.deadline:
            return
        table = self.best | changes
        try:
            with using(self.step, table):
                error = self.bench.error(self.step.hidden(), self.exact)
                us = self.bench.time([self.step.hidden]) / LAYERS
        except Exception as problem:  # a lab script: name it and go on
            print(f"{self.kind:5} failed: {changes} {str(problem)[:160]}", flush=True)
            return
        if self.bench.is_dry:
            return
        faster = us < self.fastest and error < TOLERANCE
        for role, choice in changes.items():
            if role in SHAPES and error < TOLERANCE:
                self.times.setdefault(role, []).append((us, choice))
        print(
            f"{self.kind:5} {us:8.2f} {us - min(self.fastest, 1e4):+8.2f}{'*' if faster else ' '} "
            f"error {error:.4f} {changes}",
            flush=True,
        )
        if faster:
            self.fastest, self.best = us, table

    def run(self) -> None:
        """Try everything once, and the fastest few of each role once more beside the others."""
        self.attempt()
        for role, choices in ONE_ROW[self.kind].items():
            for choice in choices:
                self.attempt(**{role: choice})
            self.vary(role)
        for role, timed in self.times.items():
            best = self.best.get(role)
            few = sorted(timed, key=lambda item: item[0])[:4]
            for _, choice in few:
                if choice != best:
                    self.attempt(**{role: choice})
        for changes in ATTENTION:
            self.attempt(attention=changes)
        if self.bench.is_dry:
            return
        self.leave_out()
        with using(self.step, self.best):
            whole = self.bench.time([self.step.tokens])
        rest = whole - LAYERS * self.fastest
        step_us = 32 * self.fastest + rest
        print(
            f"{self.kind:5} best {self.fastest:.2f} us a layer, head and rest {rest:.0f} us, "
            f"so {1e6 / step_us:.0f} tokens/s in 32 layers: {self.best}",
            flush=True,
        )
        for role, choice in self.best.items():
            if role in SHAPES:
                print(f'    ("{self.kind}", _{role.upper()}): {code_of(choice)},', flush=True)

    def vary(self, role: str) -> None:
        """Try the best choice of a role with the norm in the other place, and a `Row` with other
        amounts of prefetching."""
        built_in = _ONE_ROW.get((self.kind, SHAPES[role]))
        choices = [self.best.get(role, built_in)]
        if self.bench.is_dry:
            choices += ONE_ROW[self.kind][role]
        for choice in choices:
            if role in ("qkv", "gate_up") and isinstance(choice, Direct | Row):
                self.attempt(**{role: replace(choice, norm=1 - choice.norm)})
            if isinstance(choice, Row) and (choice == built_in or not self.bench.is_dry):
                for early in EARLY:
                    self.attempt(**{role: replace(choice, early=early)})

    def leave_out(self) -> None:
        """Print how much faster the chain is without each of its parts."""
        saved: dict[str, float] = {}
        with using(self.step, self.best):
            for part in (*FUNCTIONS, "qkv", "o", "gate_up", "down"):
                with without(part):
                    self.step.hidden()  # makes the results that later calls reuse
                    us = self.bench.time([self.step.hidden]) / LAYERS
                    saved[part] = self.fastest - us
        shown = "  ".join(f"{part} {us:.1f}" for part, us in saved.items())
        print(f"{self.kind:5} us of a layer that a part costs: {shown}", flush=True)


def code_of(choice: Any) -> str:
    """A choice as it is written in `kernels.packed.choice`."""
    own = [(field.name, getattr(choice, field.name), field.default) for field in fields(choice)]
    needed = [str(value) for _, value, default in own if default is MISSING]
    others = [f"{name}={value}" for name, value, default in own if default not in (MISSING, value)]
    return f"{type(choice).__name__}({', '.join(needed + others)})"


def one(bench: Bench, args: argparse.Namespace, deadline: float) -> None:
    """Search the fastest chain of each format."""
    kinds = ["bf16", *args.kinds]
    for index, kind in enumerate(kinds):
        left = deadline - time.monotonic()
        Search(bench, kind, time.monotonic() + left / (len(kinds) - index)).run()
        if not bench.is_dry:
            torch.cuda.empty_cache()


# --- many rows -----------------------------------------------------------------------------------


def tall_tiles(rows: int, shape: Shape) -> Iterator[tuple[Skinny, bool]]:
    """Tiles of int4 for many rows, and whether they round scaled numbers."""
    for height in HEIGHTS:
        for block_n, stages, warps in TALL:
            if height > rows or (shape.role == "gate_up" and height * block_n > 128 * 128):
                continue
            sums = height * block_n // (32 * warps) * (2 if shape.role == "gate_up" else 1)
            for split_k in (1, 2, 4) if shape.may_split else (1,):
                tiles = -(-shape.outputs // block_n) * (rows // height) * split_k
                if split_k > 1 and tiles > 600:
                    continue
                choice = Skinny(block_n, 256, stages, warps, split_k, height)
                if height >= 128:
                    yield choice, True
                if sums <= 64:
                    yield choice, False


def many(bench: Bench, args: argparse.Namespace, deadline: float) -> None:
    """Print the tiles of int4 for 128 and 256 rows, the fastest last."""
    measurement = None
    if not bench.is_dry:
        measurement = measure_packed.Measurement(measure_packed.Path("/dev/null"), deadline)
    for rows in (128, 256, 64):
        for shape in measure_packed.SHAPES[:4]:
            fastest: list[tuple[float, str, list[Any]]] = []
            for rounds in (True, False) if rows > 64 else (False,):
                choices: list[PackedChoice] = [
                    choice for choice, own in tall_tiles(rows, shape) if own == rounds
                ]
                choices += [None] if rounds else []
                with (
                    patch.object(packed_skinny, "_rounds", lambda *_, own=rounds: own),
                    patch.object(measure_packed, "candidates", lambda *_, own=choices: iter(own)),
                ):
                    if measurement is None:
                        compile_layers(choices, rows, shape)
                        continue
                    if time.monotonic() > deadline:
                        return
                    measurement.run(rows, shape, "int4")
                    found = measurement.figures["cases"][-1]["found"]
                    how = "rounds" if rounds else "exact"
                    fastest += [(us, how, of) for us, _, *of in found]
            for us, how, of in sorted(fastest, key=lambda item: item[0])[:6]:
                sizes = f"({', '.join(map(str, [of[1], *of[3:7]]))})" if len(of) > 1 else "a copy"
                print(f"    {us:7.1f} us {how:6} (_{shape.role.upper()}, {rows}): {sizes},")


def compile_layers(choices: list[PackedChoice], rows: int, shape: Shape) -> None:
    x = torch.empty(rows, shape.inputs, dtype=BF16, device="meta")
    weight = measure_packed.tile_on_meta("int4", shape)
    for choice in choices:
        if choice is None or choice.split_k == 1:  # compiled for all splits
            measure_packed.layer_call(shape, choice, x, weight)


# --- the program ---------------------------------------------------------------------------------

PARTS = {"one": one, "many": many}


def compile_all(names: list[str], args: argparse.Namespace) -> None:
    """Compile in this process, which must not have used the GPU."""
    bench, began = Bench(torch.device("meta")), time.monotonic()
    executor = ForkingExecutor(args.jobs)
    with torch.inference_mode(), without_gpu(H200), compiling_only(executor) as kinds:
        for name in names:
            PARTS[name](bench, args, float("inf"))
    failed = [key for key, kernel in kinds.items() if kernel.future.exception() is not None]
    took = time.monotonic() - began
    print(f"compiled {len(kinds)} kernels in {took:.0f} s, {len(failed)} failed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["int4", "fp8"])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    os.environ["SLIPSTREAM_ROW_LAYER"] = "0"  # which leaves nothing to choose
    names = args.parts or list(PARTS)
    failed = fails_in_fork(partial(compile_all, names, args))
    if args.compile_only or failed:
        raise SystemExit(int(failed))
    bench = Bench(torch.device("cuda", 0))
    began = time.monotonic()
    with torch.inference_mode():
        for index, name in enumerate(names):
            left = began + args.seconds - time.monotonic()
            PARTS[name](bench, args, time.monotonic() + left / (len(names) - index))
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    if bench.results:
        print(json.dumps(bench.results))


if __name__ == "__main__":
    main()
