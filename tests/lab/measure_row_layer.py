"""Prints how long a layer of few requests takes if one launch computes all between two attentions.

    PYTHONPATH=.src python tests/lab/measure_row_layer.py [--kinds int4,fp8] [--rows 1,2,4]
        [--layers 32] [--seconds 50] [--compile-only]

A chain of layers of Llama 8B's shape with random weights, in a CUDA graph with dependent launches
as in a real step: first with a launch for each product, then with `kernels.packed.persistent` in
several forms. A line: microseconds of a layer, the difference to the first chain, microseconds and
bandwidth of the launches without attention between them, the relative error against torch's chain,
and the changes of the form and of attention's plan. Lines begin with the format and the rows. The
first launch is checked alone: it fails after 0.1 s if its programs do not meet. All kernels are
compiled first, in parallel processes and without the GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from chain_step import BF16, Step, planned
from linear_tune import fails_in_fork
from measure_chain import H200, Bench
from measure_packed_row import TOLERANCE, make_step
from measure_packed_row import using as choosing
from torch import Tensor

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.packed.persistent import row_layer
from slipstream.kernels.packed.persistent.row_weights import RowLayer
from slipstream.kernels.packed.persistent.triton import hopper_row
from slipstream.kernels.packed.persistent.triton.hopper_row import Form

PATIENCE = 10**8 // 1024  # of the programs, times 1024 cycles
# The last program of attention sums its splits, as in models that use the kernel.
WHOLE = {"last_sums": 4}
FORMS: Sequence[tuple[dict[str, int], dict[str, int]]] = (  # of the kernel, of attention's plan
    ({}, {}),
    ({"stages": 6, "early": 0}, {}),
    ({"stages": 5, "early": 0}, {}),
    ({"held": 8, "registers": 152, "early": 0}, {}),
    ({}, {"splits": 8}),
)
FEW_ROWS: Sequence[tuple[dict[str, int], dict[str, int]]] = (
    ({}, {}),
    ({"held": 1}, {}),
    ({"held": 1, "registers": 112}, {}),
    ({"early": 0}, {}),
    ({"early": 1}, {}),
    ({"stages": 4}, {}),
    ({"flying": 4}, {}),
)


@contextmanager
def using(form: Form, plan: dict[str, int]) -> Iterator[None]:
    """Inside, models use the kernel in this form, and attention with these changes of its plan."""
    multiply = partial(hopper_row.multiply, form=form, patience=PATIENCE)
    with planned(plan), patch.object(hopper_row, "multiply", multiply):
        yield


def layers_of(step: Step) -> list[RowLayer]:
    """The weights between the attentions of a step's model."""
    model = step.model
    x = torch.empty(1, model.config.hidden_size, dtype=BF16, device=step.ids.device)
    layers: list[RowLayer] | None = model.row_decoder._layers(model._blocks, x)
    assert layers is not None, "the kernel does not know this model"
    return layers


def launches(layers: Sequence[RowLayer], form: Form, counter: Tensor, rows: int) -> None:
    """The launches of all layers without attention: each reads the stream of the one before."""
    hidden = counter.new_ones(rows, layers[0].o.shape[0], dtype=BF16)
    for layer in layers:
        multiply = partial(hopper_row.multiply, form=form, patience=PATIENCE)
        hidden, _ = multiply(hidden, hidden, layer, counter)


def check_alone(layers: Sequence[RowLayer], rows: int) -> None:
    """Compare the first launch with the plain version; it is the first that could hang."""
    device = layers[0].o.device
    hidden = layers[0].o.shape[0]
    x, residual = (torch.randn(rows, hidden, device=device).to(BF16) for _ in range(2))
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    exact = row_layer.multiply_row_reference(x.float(), residual.float(), layers[0])
    for turn in range(3):
        got = hopper_row.multiply(x, residual, layers[0], counter, patience=PATIENCE)
        torch.cuda.synchronize()
        bench = Bench(device)
        errors = [
            bench.error(a, b)
            for a, b in zip(got, exact, strict=True)
            if a is not None and b is not None
        ]
        count = int(counter) & 0xFFFFFFFF
        shown = ", ".join(f"{error:.5f}" for error in errors)
        print(f"launch {turn}: relative errors of stream and qkv {shown}; counter {count:#x}")
        assert all(error < TOLERANCE for error in errors)


def run(bench: Bench, kind: str, rows: int, count: int, deadline: float) -> None:
    """Print the chain of one format and number of rows in all forms."""
    step, name = make_step(kind, bench.device, 2 if bench.is_dry else count, rows), f"{kind} {rows}"
    layers = layers_of(step)
    counter = torch.zeros(1, dtype=torch.int32, device=bench.device)
    if not bench.is_dry:
        check_alone(layers, rows)
    with patch.dict(os.environ, {"SLIPSTREAM_ROW_LAYER": "0"}):
        with choosing(step, {"torch": None}):
            exact = step.hidden()
        with choosing(step, {}):
            error = bench.error(step.hidden(), exact)
            today = bench.time([step.hidden]) / count
        with planned(WHOLE):
            whole = bench.time([step.hidden]) / count
        if not bench.is_dry:
            rest = bench.time([step.tokens]) - today * count
    if not bench.is_dry:
        print(
            f"{name:7} today {today:.2f} us a layer, {whole:.2f} if attention's last program sums, "
            f"head and rest {rest:.0f} us, error {error:.4f}",
            flush=True,
        )
    num_bytes = sum(weight.nbytes for layer in layers for weight in layer.matrices)
    names = [field.name for field in fields(Form)]
    fastest, alone = float("inf"), dict[Form, float]()
    for changes, plan in FORMS if rows == 1 else FEW_ROWS:
        if time.monotonic() > deadline:
            return
        assert set(changes) <= set(names)
        form = replace(hopper_row.form_of(layers[0], rows), **changes)
        try:
            with using(form, plan), patch.dict(os.environ, {"SLIPSTREAM_ROW_LAYER": "1"}):
                error = bench.error(step.hidden(), exact)
                us = bench.time([step.hidden]) / count
            if form not in alone:
                alone[form] = bench.time([partial(launches, layers, form, counter, rows)]) / count
        except Exception as problem:  # a lab script: name it and go on
            print(f"{name:7} failed: {changes} {plan} {str(problem)[:160]}", flush=True)
            if bench.is_dry or "CUDA error" in str(problem):
                raise
            continue
        if bench.is_dry:
            continue
        star = "*" if us < fastest and error < TOLERANCE else " "
        fastest = min(us, fastest)
        rate = num_bytes / count / alone[form] / 1e6
        print(
            f"{name:7} {us:8.2f} {us - today:+8.2f}{star} alone {alone[form]:7.2f} us "
            f"{rate:.2f} TB/s error {error:.4f} {changes} {plan}",
            flush=True,
        )
    if not bench.is_dry:
        step_us = 32 * fastest + rest
        print(f"{name:7} best {fastest:.2f}, so {rows * 1e6 / step_us:.0f} tokens/s in 32 layers")


def compile_all(args: argparse.Namespace) -> None:
    """Compile in this process, which must not have used the GPU."""
    bench, began = Bench(torch.device("meta")), time.monotonic()
    executor = ForkingExecutor(args.jobs)
    with torch.inference_mode(), without_gpu(H200), compiling_only(executor) as kinds:
        for kind, rows in product(args.kinds, args.rows):
            run(bench, kind, rows, 2, float("inf"))
    failed = [key for key, kernel in kinds.items() if kernel.future.exception() is not None]
    took = time.monotonic() - began
    print(f"compiled {len(kinds)} kernels in {took:.0f} s, {len(failed)} failed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["int4", "fp8"])
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=[1])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    failed = fails_in_fork(partial(compile_all, args))
    if args.compile_only or failed:
        raise SystemExit(int(failed))
    bench, began = Bench(torch.device("cuda", 0)), time.monotonic()
    with torch.inference_mode():
        cases = [*product(args.kinds, args.rows)]
        for index, (kind, rows) in enumerate(cases):
            left = began + args.seconds - time.monotonic()
            deadline = time.monotonic() + left / (len(cases) - index)
            run(bench, kind, rows, args.layers, deadline)
            torch.cuda.empty_cache()
            print(f"-- {kind} {rows}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
