"""Prints how near the step of gated delta layers comes to the time of its states' bytes, by plan.

    PYTHONPATH=.src:tests/lab python tests/lab/measure_delta.py [--rows 1,8,32,128,256]
        [--logs 0,3] [--only WORD] [--compile-only]

Layers of Qwen3.5-27B's shape run one after another in a CUDA graph with dependent launches. Their
states together do not fit the cache. With a log, each row has logged tokens of a random number to
absorb, and as many tokens as the log holds. Each entry is microseconds of a layer's
`_step_kernel` alone, and the share of 4.24 TB/s at which its states are read once and written once.
The line `layer` times the whole layer with the built-in plan: the step, then `_finish_rows_kernel`.
A plan is named by values of a program, warps, registers, order of the grid, `cs` if states are
marked as read once, and `once` if the tokens of a row do not wait for one another. A plan whose
outputs or states differ from the reference's is printed as wrong. All kernels are compiled first,
in parallel processes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from linear_tune import fails_in_fork, time_in_graph
from measure_chain import H200
from torch import Tensor

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.recurrent.gated_delta import gated_delta, gated_delta_reference
from slipstream.kernels.recurrent.rows import (
    COUNT,
    LAG,
    LENGTH,
    SLOT,
    START,
    BulkRows,
    DeltaRows,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
)
from slipstream.kernels.recurrent.triton import delta_step
from slipstream.kernels.recurrent.triton.delta_step import (
    ROW_HEAD_TILE,
    TILE_HEAD_ROW,
    TILE_ROW_HEAD,
    StepPlan,
)

SHAPE = DeltaShape(16, 48, 128, 128, 4)
STATE_BYTES = SHAPE.num_value_heads * SHAPE.key_dim * SHAPE.value_dim * 4
BANDWIDTH = 4.24e12  # bytes a second
COLD_BYTES = 400 << 20  # of the states of all layers, eight times the cache
MIN_LAYERS = 3
ORDERS = {TILE_HEAD_ROW: "thr", TILE_ROW_HEAD: "trh", ROW_HEAD_TILE: "rht"}
BUILT_IN = delta_step.plan_step
# values of a program, warps, registers
SIZES = {
    0: (
        *((32, 4, 96), (32, 4, 128), (32, 4, 80), (64, 4, 128), (64, 4, 104)),
        *((32, 2, 128), (32, 2, None), (32, 1, 200), (32, 1, 168), (16, 1, 128), (16, 1, None)),
        *((16, 2, 80), (128, 4, 168), (64, 2, None), (64, 2, 200), (128, 4, None)),
    ),
    3: (
        *((32, 4, 128), (32, 4, 96), (64, 4, 168), (64, 4, 128), (32, 2, 168)),
        *((32, 2, 128), (32, 1, None), (16, 1, None), (16, 1, 168), (16, 2, 96), (16, 4, 64)),
        *((64, 2, None), (128, 4, None), (32, 1, 200)),
    ),
}
AT_ONCE = ((32, 1, None), (32, 1, 200), (16, 1, None), (16, 1, 168), (32, 2, 168), (64, 2, None))
VARIED = {0: ((32, 1, 200), (64, 4, 128)), 3: ((32, 1, None),)}


def plans(log: int) -> list[StepPlan]:
    """The plans to compare: all sizes in the order of memory, and a few of them in other orders."""
    found = [StepPlan(*size) for size in SIZES[log]]
    for size in VARIED[log]:
        plan = StepPlan(*size)
        found += [
            replace(plan, order=ROW_HEAD_TILE),
            replace(plan, order=TILE_ROW_HEAD),
            replace(plan, streams=True),
            replace(plan, order=TILE_ROW_HEAD, streams=True),
        ]
    if log > 1:
        found += [StepPlan(*size, at_once=True) for size in AT_ONCE]
    return found


def name_of(plan: StepPlan) -> str:
    sizes = f"{plan.block_v:3} x{plan.warps} {plan.registers or 'any':>3}"
    return f"{sizes} {ORDERS[plan.order]}{' cs' if plan.streams else ''}{' once' * plan.at_once}"


@dataclass
class Case:
    """Layers with separate states, and a step's rows in shuffled slots."""

    x: Tensor
    weights: DeltaWeights
    gate: OutputGate
    states: list[DeltaState]
    rows: DeltaRows

    @classmethod
    def make(cls, num_rows: int, log: int, layers: int, device: torch.device) -> Case:
        make = torch.Generator().manual_seed(num_rows + log)
        slots, count = num_rows + 1, max(1, log)
        values = torch.zeros(7, num_rows, dtype=torch.int32)
        values[SLOT] = torch.randperm(num_rows, generator=make).int()
        values[LENGTH] = 500
        values[LAG] = torch.randint(1, log + 1, (num_rows,), generator=make).int() if log else 0
        values[START] = values[LENGTH] + values[LAG]
        values[COUNT] = count
        starts = torch.arange(0, num_rows * count + 1, count, dtype=torch.int32)
        rows = DeltaRows(
            values.to(device), starts.to(device), log, count, log, BulkRows([]), on_host=False
        )
        random = partial(torch.randn, device=device)
        both = random(num_rows * count, SHAPE.channels + SHAPE.value_size).bfloat16()
        x, z = both.split([SHAPE.channels, SHAPE.value_size], dim=1)
        heads = SHAPE.num_value_heads
        weights = DeltaWeights(
            0.5 * random(SHAPE.conv_width, SHAPE.conv_channels).t(),
            random(heads).abs(),
            random(heads),
        )
        states = [
            DeltaState(
                0.1 * random(slots, heads, SHAPE.key_dim, SHAPE.value_dim),
                random(slots, 3 + log, SHAPE.channels).bfloat16(),
                random(1, heads, SHAPE.key_dim, SHAPE.value_dim),
                random(1, 3, SHAPE.channels).bfloat16(),
            )
            for _ in range(layers)
        ]
        return cls(x, weights, OutputGate(z, random(SHAPE.value_dim), 1e-6), states, rows)

    def step(self, out: Tensor, state: DeltaState) -> None:
        delta_step.step_rows(self.x, self.weights, SHAPE, state, self.rows, out)

    def layer(self, run: Callable[..., Tensor], state: DeltaState) -> Tensor:
        return run(self.x, self.weights, SHAPE, state, self.rows, self.gate)

    def out(self) -> Tensor:
        return self.x.new_zeros(self.x.shape[0], SHAPE.value_size)


def use(plan: StepPlan | None) -> patch:  # type: ignore[valid-type]
    """Let steps use this plan; None = the built-in one."""
    return patch.object(delta_step, "plan_step", BUILT_IN if plan is None else lambda *_: plan)


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact.float()).norm() / exact.float().norm())


def wrong_plans(log: int, of: Sequence[StepPlan], device: torch.device) -> dict[StepPlan, str]:
    """Compare outputs and states of each plan with the reference's."""
    case, found = Case.make(9, log, 1, device), {}
    [state] = case.states

    def run(kernel: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        own = DeltaState(*(tensor.clone() for tensor in vars(state).values()))
        return case.layer(kernel, own), own.state[:-1], own.history[:-1, :3]

    exact = run(gated_delta_reference)
    for plan in of:
        with use(plan):
            errors = [error(*pair) for pair in zip(run(gated_delta), exact, strict=True)]
        if not (errors[0] < 1e-2 and errors[1] < 1e-4 and errors[2] == 0):
            found[plan] = "errors " + ", ".join(f"{each:.1e}" for each in errors)
    return found


def measure(log: int, row_counts: Sequence[int], of: Sequence[StepPlan]) -> None:
    """Print a table of one log."""
    device = torch.device("cuda", 0)
    wrong = wrong_plans(log, of, device)
    table: dict[StepPlan | None | str, list[str]] = {}
    for num_rows in row_counts:
        layers = max(MIN_LAYERS, COLD_BYTES // (num_rows * STATE_BYTES))
        case = Case.make(num_rows, log, layers, device)
        out, ideal = case.out(), 2e6 * num_rows * STATE_BYTES / BANDWIDTH
        for plan in (None, *of):
            if plan not in wrong:
                with use(plan):
                    us = time_in_graph([partial(case.step, out, state) for state in case.states])
                table.setdefault(plan, []).append(f"{us:8.1f} {ideal / us:4.0%}")
        us = time_in_graph([partial(case.layer, gated_delta, state) for state in case.states])
        table.setdefault("layer", []).append(f"{us:8.1f} {ideal / us:4.0%}")
        del case, out
        torch.cuda.empty_cache()
    print(f"log {log}, rows".ljust(26) + "".join(f"{rows:>13}" for rows in row_counts))
    for plan, cells in table.items():
        name = plan if isinstance(plan, str) else "built-in"
        name = name_of(plan) if isinstance(plan, StepPlan) else name
        print(f"  {name:24}" + "".join(cells), flush=True)
    for plan, reason in wrong.items():
        print(f"  {name_of(plan)} is WRONG: {reason}")


def compile_all(logs: Sequence[int], word: str) -> None:
    """Compile in this process, which must not have used the GPU."""
    began = time.monotonic()
    executor = ForkingExecutor(os.cpu_count() or 1)
    with torch.inference_mode(), without_gpu(H200), compiling_only(executor) as kernels:
        for log in logs:
            case = Case.make(8, log, 1, torch.device("meta"))
            for plan in (None, *chosen(log, word)):
                with use(plan):
                    case.layer(gated_delta, case.states[0])
    failed = sum(kernel.future.exception() is not None for kernel in kernels.values())
    took = time.monotonic() - began
    print(f"compiled {len(kernels)} kernels in {took:.0f} s, {failed} failed", flush=True)


def chosen(log: int, word: str) -> list[StepPlan]:
    return [plan for plan in plans(log) if word in name_of(plan)]


def main() -> None:
    parser = argparse.ArgumentParser()
    numbers = partial(map, int)
    parser.add_argument("--rows", default="1,8,32,128,256")
    parser.add_argument("--logs", default="0,3")
    parser.add_argument("--only", default="", help="a part of the names of plans")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    logs, row_counts = list(numbers(args.logs.split(","))), list(numbers(args.rows.split(",")))
    failed = fails_in_fork(partial(compile_all, logs, args.only))
    if args.compile_only or failed:
        raise SystemExit(int(failed))
    began = time.monotonic()
    with torch.inference_mode():
        for log in logs:
            measure(log, row_counts, chosen(log, args.only))
    print(f"measured in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
