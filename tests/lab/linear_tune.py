"""Measures which kernel computes a linear layer of few rows fastest on this GPU.

`measure_linear.py` and other scripts run it. Each candidate runs in a CUDA graph over enough copies
of the weights that none stays in the cache. Candidates with wrong results are discarded.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from slipstream.kernels.linear.linear import (
    gated_linear,
    gated_linear_reference,
    linear,
    linear_parts,
    linear_reference,
)
from slipstream.kernels.linear.linear_choice import (
    Choice,
    Gemv,
    Shape,
    Skinny,
    default_choice,
    fits,
)
from slipstream.kernels.linear.linear_tuned import card_name, save_tuned

logger = logging.getLogger(__name__)
TUNED_ROWS = (1, 16, 32, 64)
COLD_BYTES = 256 << 20  # bytes of weight copies: several times the cache of any GPU
MIN_CALLS = 16  # calls in a graph, so that the cost of its launch does not matter
MARGIN = 0.98  # a kernel must need less than this share of torch's time
TOLERANCE = 1e-2  # largest relative error against float32 with the same inputs
_GEMVS = (
    *((4, 1024, 4, 0), (4, 2048, 4, 0), (8, 1024, 4, 0), (8, 512, 4, 0), (2, 1024, 2, 0)),
    *((2, 1024, 4, 0), (8, 1024, 8, 0), (4, 1024, 4, 4), (8, 1024, 4, 3)),
)
_TILES = ((64, 128, 4, 4), (64, 256, 3, 4), (64, 64, 4, 4), (128, 128, 3, 4), (128, 64, 4, 8))
_GATED_TILES = ((64, 128, 3, 4), (64, 64, 5, 4), (64, 64, 4, 4), (128, 64, 4, 8))

Timed: TypeAlias = tuple[float, Choice]  # microseconds a call
TimeCalls: TypeAlias = Callable[[Sequence[Callable[[], object]]], float]


def candidates(shape: Shape, num_rows: int) -> Iterator[Choice]:
    """Yields the kernels worth measuring for a layer, except torch's."""
    if num_rows == 1:
        yield from (Gemv(*sizes) for sizes in _GEMVS)
    if num_rows > 64:
        return
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    default = default_choice(shape, num_rows)
    if isinstance(default, Skinny):
        yield default
    for block_n, block_k, stages, warps in _GATED_TILES if shape.role == "gate_up" else _TILES:
        outputs = shape.outputs // 2 if shape.role == "gate_up" else shape.outputs
        tiles = -(-outputs // block_n)
        for split_k in (1, 2, 3, 4, 8) if shape.may_split else (1,):
            choice = Skinny(block_n, block_k, stages, warps, split_k, block_m)
            fills = 60 <= tiles * split_k <= 700 or split_k == 1
            if fills and shape.inputs >= split_k * block_k and choice != default:
                yield choice


def layer_call(shape: Shape, choice: Choice, x: Tensor, weight: Tensor) -> Tensor:
    """Run this layer as a model does, but without its norm; x: [M, K]."""
    if shape.role == "gate_up":
        return gated_linear(x, weight, None, "silu", choice)
    if shape.may_split:
        return linear_parts(x, weight, None, choice)
    return linear(x, weight, None, choice)


def relative_error(shape: Shape, choice: Choice, x: Tensor, weight: Tensor) -> float:
    """The relative error of `layer_call` against float32; NaN if an output was not written."""
    exact_of = gated_linear_reference if shape.role == "gate_up" else linear_reference
    exact = exact_of(x.float(), weight.float())
    got = layer_call(shape, choice, x, weight)
    if got.dim() == 3:
        got = got.sum(0)
    return float((got.float() - exact).norm() / exact.norm())


def measure(
    shape: Shape,
    num_rows: int,
    choices: Iterable[Choice],
    device: torch.device,
    dtype: torch.dtype,
    time_calls: TimeCalls | None = None,
    deadline: float = float("inf"),
) -> list[Timed]:
    """Measure the choices that work: (microseconds a call, choice), fastest first.

    It stops at `deadline`, a value of time.monotonic(). A choice that fails or has a large error is
    logged and left out.
    """
    time_calls = time_calls or time_in_graph
    count = max(1, min(64, COLD_BYTES // (2 * shape.outputs * shape.inputs)))
    size = (shape.outputs, shape.inputs)
    make = torch.Generator(device).manual_seed(shape.outputs)
    scale = shape.inputs**-0.5
    copies = [
        torch.empty(size, device=device, dtype=dtype).normal_(0, scale, generator=make)
        for _ in range(count)
    ]
    x = torch.empty(num_rows, shape.inputs, device=device, dtype=dtype).normal_(generator=make)
    found: list[Timed] = []
    problems: tuple[type[Exception], ...] = (RuntimeError, ArithmeticError, ValueError)
    problems += _errors_of_triton()
    for choice in choices:
        if time.monotonic() > deadline:
            break
        if not fits(choice, shape, num_rows):
            continue
        try:
            error = relative_error(shape, choice, x, copies[0])
            if not error < TOLERANCE:
                raise ArithmeticError(f"relative error {error:.1e}")
            calls = [_call(shape, choice, x, weight) for weight in copies]
            calls *= -(-MIN_CALLS // count)
            found.append((time_calls(calls), choice))
        except problems as problem:
            logger.warning(
                "%s, %d rows: %s is left out, since it failed: %s", shape, num_rows, choice, problem
            )
    return sorted(found, key=lambda timed: timed[0])


def _errors_of_triton() -> tuple[type[Exception], ...]:
    """The exceptions that Triton raises for a kernel that does not fit the GPU."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def _call(shape: Shape, choice: Choice, x: Tensor, weight: Tensor) -> Callable[[], object]:
    return lambda: layer_call(shape, choice, x, weight)


def best_of(timed: Sequence[Timed]) -> Choice:
    """The fastest choice if it beats torch by more than `MARGIN`, else torch (None)."""
    torch_time = next((us for us, choice in timed if choice is None), float("inf"))
    return timed[0][1] if timed and timed[0][0] < MARGIN * torch_time else None


def tune(
    shapes: Iterable[Shape],
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int] = TUNED_ROWS,
    seconds: float = float("inf"),
) -> dict[tuple[Shape, int], Choice]:
    """Measure every shape and number of rows, and save the fastest choices for this GPU.

    Returns them by (shape, number of rows). After `seconds` it stops, without an unfinished
    comparison.
    """
    deadline = time.monotonic() + seconds
    winners: dict[tuple[Shape, int], Choice] = {}
    for shape in shapes:
        for num_rows in rows:
            choices = [None, *candidates(shape, num_rows)]
            timed = measure(shape, num_rows, choices, device, dtype, deadline=deadline)
            if time.monotonic() > deadline:
                break  # leave out an unfinished comparison
            winners[shape, num_rows] = best_of(timed)
            logger.info("%s, %d rows: %s", shape, num_rows, timed[:3])
        save_tuned(card_name(device), dtype, winners)
    return winners


def time_in_graph(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Time calls that run one after another in a CUDA graph: median microseconds per call."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return statistics.median(times) * 1e3 / len(calls)


def fails_in_fork(work: Callable[[], object]) -> bool:
    """Whether `work` fails in a forked process, which prints the traceback.

    Scripts compile kernels so, since a process that has compiled them all cannot use the GPU
    afterwards.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] != 0
