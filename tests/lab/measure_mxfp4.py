"""Prints how long each product of gpt-oss-20b's experts in MXFP4 takes on this GPU, by kernel.

    PYTHONPATH=.src python tests/lab/measure_mxfp4.py [--rows 8,16,32,64,128,256] [--compile-only]
        [--forms all] [--skew 1.5] [--peak 4.24] [--jobs 16]

It first compiles all kernels in parallel processes, without the GPU; `--compile-only` ends there.
Then, for each number of rows, it prints microseconds of gate_up and of down with the share of the
peak bandwidth (TB/s) that the weights of the touched experts alone would need, and of both with
what sorts the rows, and the relative error against float32. "wide" is `packed_experts` with words
in spans of 256 columns, "narrow" the same with spans of 64, and the others are the forms of
`hopper_experts`: rows of a tile, consumers, stages of words and of x. `--forms all` tries more.

Rows choose their experts at random; `--skew` adds so many standard deviations to the logits of
some experts, as a router that prefers these does. A watchdog ends the script if nothing is printed
for 20 seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Timer
from typing import Any
from unittest.mock import patch

import torch
from linear_tune import time_in_graph
from measure_packed import random_packed
from torch import Tensor

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.device import Card
from slipstream.kernels.linear.experts import PackedExperts, Routing
from slipstream.kernels.linear.linear_choice import Shape
from slipstream.kernels.linear.moe import run_experts_reference, select_experts
from slipstream.kernels.linear.triton.expert_rows import empty_parts
from slipstream.kernels.packed.grouped.triton.hopper_experts import (
    Form,
    expert_parts,
    forms_of,
    multiply_sorted,
)
from slipstream.kernels.packed.grouped.triton.sort_rows import arrange
from slipstream.kernels.packed.triton import packed_experts
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.tiled import TiledWeight, tile

EXPERTS, HIDDEN, INNER, TOP_K = 32, 2880, 2880, 4
BF16 = torch.bfloat16
LAYERS = 2  # of different weights, 0.45 GB each: far more than the cache
ROWS = (8, 16, 32, 64, 128, 256)
MORE_FORMS = {
    16: (Form(16, 2, 8, 4),),
    32: (Form(16, 3, 6, 4), Form(32, 2, 8, 3)),
    64: (Form(32, 3, 5, 3), Form(64, 2, 6, 2)),
}
SECONDS_OF_SILENCE = 20.0


def forms(rows: int, more: bool) -> list[Form]:
    """The forms to measure, first the one that is chosen."""
    first = forms_of(rows, TOP_K, EXPERTS)[0]
    others = MORE_FORMS[first.block_m] if more else ()
    return [first, *(form for form in others if form != first)]


def sizes() -> Iterator[tuple[int, int]]:
    yield EXPERTS * 2 * INNER, HIDDEN
    yield EXPERTS * HIDDEN, INNER


class Layer:
    """Random weights of a layer, in both forms of words."""

    def __init__(self, device: torch.device) -> None:
        packed = [random_packed("mxfp4", Shape("other", *size), device) for size in sizes()]
        biases = [
            torch.empty(EXPERTS, size, device=device, dtype=BF16).normal_()
            for size in (2 * INNER, HIDDEN)
        ]
        wide, narrow = ([_tiled(own, form) for own in packed] for form in (False, True))
        self.wide, self.narrow = (
            PackedExperts(*both, EXPERTS, *biases, "clamped_swiglu") for both in (wide, narrow)
        )

    def experts(self, name: str) -> PackedExperts:
        return self.wide if name == "wide" else self.narrow


def _tiled(weight: PackedWeight, narrow: bool) -> TiledWeight:
    return tile(weight, narrow)


def touched_bytes(ids: Tensor, gated: bool) -> int:
    """Bytes of codes and scales that a product needs."""
    rows, columns = (2 * INNER, HIDDEN) if gated else (HIDDEN, INNER)
    return int(ids.unique().numel()) * rows * columns * 17 // 32


@contextmanager
def only(gated: bool | None) -> Iterator[None]:
    """Inside, `packed_experts` computes only one of both products (None = both)."""

    def one(
        x: Tensor, inner_size: int, work: Any, multiply: Any, spare: int = 0, absent: bool = False
    ) -> Tensor:
        inner = x.new_empty(work.num_rows * work.top_k, inner_size).fill_(0.5)
        parts = empty_parts(x, work.top_k, 0)
        multiply(gated, x if gated else inner, inner if gated else parts)
        return parts

    if gated is None:
        yield
        return
    with patch.object(packed_experts, "both_products", one):
        yield


def call_of(
    name: str, form: Form | None, layer: Layer, x: Tensor, chosen: tuple[Tensor, Tensor],
    gated: bool | None,
) -> Callable[[], object]:  # fmt: skip
    """A call of one product, or of both with what comes before; its inputs exist before."""
    weights, ids = chosen
    experts = layer.experts(name)
    if form is None:

        def old() -> Tensor:
            with only(gated):
                return packed_experts.expert_parts(x, experts, weights, ids)

        return old
    if gated is None:
        return partial(expert_parts, x, experts, weights, ids, forms=(form, form))
    plan, pairs, rows = arrange(x, weights, ids, EXPERTS, form.block_m)
    if gated:
        out = torch.empty_like(rows)
    else:
        rows, out = torch.ones_like(rows), empty_parts(x, TOP_K, 0)
    work = plan, pairs, weights
    return partial(multiply_sorted, rows, experts, work, out, gated, form)


def variants(rows: int, more: bool) -> Iterator[tuple[str, Form | None]]:
    yield "wide", None
    yield "narrow", None
    for form in forms(rows, more):
        yield f"{form.block_m} {form.consumers} {form.stages} {form.x_stages}", form


def compile_all(args: argparse.Namespace) -> None:
    """Compile all kernels without a GPU."""
    began, device = time.monotonic(), torch.device("meta")
    card = Card("NVIDIA H200", (9, 0), 132)
    with without_gpu(card), compiling_only(ForkingExecutor(args.jobs)) as kernels:
        layer = Layer(device)
        for rows in args.rows:
            x = torch.empty(rows, HIDDEN, device=device, dtype=BF16)
            weights = torch.empty(rows, TOP_K, device=device)
            chosen = weights, torch.empty(rows, TOP_K, device=device, dtype=torch.int32)
            for name, form in variants(rows, args.forms == "all"):
                call_of(name, form, layer, x, chosen, None)()
    failed = [key for key, kernel in kernels.items() if kernel.future.exception() is not None]
    took = time.monotonic() - began
    print(f"compiled {len(kernels)} kernels in {took:.0f} s, {len(failed)} failed", flush=True)


def chosen_at_random(rows: int, skew: float, device: torch.device) -> tuple[Tensor, Tensor]:
    logits = torch.randn(rows, EXPERTS, device=device)
    logits += skew * torch.randn(EXPERTS, device=device)
    return select_experts(logits, Routing(TOP_K, renormalise=True))


def error_of(
    name: str, form: Form | None, layer: Layer, x: Tensor, chosen: tuple[Tensor, Tensor],
    expected: Tensor,
) -> float:  # fmt: skip
    got = call_of(name, form, layer, x, chosen, None)()
    assert isinstance(got, Tensor)
    got = got if got.dim() == 2 else got.sum(0, dtype=torch.float32)
    return float((got - expected).norm() / expected.norm())


def measure(args: argparse.Namespace, beat: Callable[[], None]) -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    layers = [Layer(device) for _ in range(LAYERS)]
    print("rows touched most   form             gate_up us  share   down us  share  both us  error")
    for rows in args.rows:
        x = torch.randn(rows, HIDDEN, device=device).to(BF16)
        chosen = [chosen_at_random(rows, args.skew, device) for _ in layers]
        ids = chosen[0][1].long()
        most = int(torch.bincount(ids.flatten()).max())
        expected = run_experts_reference(x.float(), layers[0].wide, chosen[0][0], ids).float()
        for name, form in variants(rows, args.forms == "all"):
            beat()
            try:
                error = error_of(name, form, layers[0], x, chosen[0], expected)
                us = []
                for gated in (True, False, None):
                    calls = [
                        call_of(name, form, layer, x, own, gated)
                        for layer, own in zip(layers, chosen, strict=True)
                    ]
                    us.append(time_in_graph(calls * 8))
            except Exception as problem:  # a lab script: name it and go on
                print(f"{rows:4} {name} failed: {problem}", flush=True)
                continue
            needed = [
                sum(touched_bytes(own[1], gated) for own in chosen) / LAYERS
                for gated in (True, False)
            ]
            shares = [of / took / 1e6 / args.peak for of, took in zip(needed, us[:2], strict=True)]
            figures = f"{us[0]:8.1f} {shares[0]:6.1%} {us[1]:9.1f} {shares[1]:6.1%} {us[2]:8.1f}"
            touched = int(ids.unique().numel())
            print(f"{rows:4} {touched:5} {most:6}   {name:16} {figures} {error:8.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=ROWS)
    parser.add_argument("--forms", choices=["chosen", "all"], default="chosen")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--peak", type=float, default=4.24, help="TB/s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    child = os.fork()
    if not child:  # which cannot use the GPU afterwards
        compile_all(args)
        os._exit(0)
    os.waitpid(child, 0)
    if args.compile_only:
        return
    timers: list[Timer] = []

    def end() -> None:
        print(f"nothing for {SECONDS_OF_SILENCE:.0f} s: a kernel hangs", flush=True)
        os._exit(1)

    def beat() -> None:
        for timer in timers:
            timer.cancel()
        timers[:] = [Timer(SECONDS_OF_SILENCE, end)]
        timers[0].daemon = True
        timers[0].start()

    beat()
    measure(args, beat)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
