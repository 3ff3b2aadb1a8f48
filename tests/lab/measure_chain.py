"""Prints which kernels make a decode step fastest on this GPU, each measured among its neighbours.

    PYTHONPATH=.src python tests/lab/measure_chain.py [roles] [attention] [parts] [heads]

`--json FILE` also saves all figures.

Layers with separate weights run one after another in a CUDA graph with dependent launches, as in a
real step; one choice at a time differs from the built-in one. `roles` prints microseconds per layer
for different linear kernels of one role. `attention` times the kernel over the caches of many
layers, for different launch plans. `parts` times a whole step and how much faster it is with one
part left out. `heads` times logits and tokens. All kernels are compiled first, in parallel and
without the GPU. A variant with wrong results is listed as wrong and not timed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import linear_tune
import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.attention.rotary_attention import rotary_attention
from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.device import Card
from slipstream.kernels.linear import head_sample
from slipstream.kernels.linear.linear_choice import H100_WINNERS, Choice, Gemv, bucket_of
from slipstream.kernels.linear.rotation import Rotation
from slipstream.runner.attention.base import CommonAttentionMetadata

from chain_step import (  # isort: skip
    BF16,
    FUNCTIONS,
    MAX_LEN,
    PAGE,
    Step,
    chooser,
    make_model,
    planned,
    shapes_of,
    step_metadata,
    use,
    without,
)
from chain_variants import ATTENTION, HEADS, MODELS, ROLES, PlanCase, Variant  # isort: skip

H200 = Card("NVIDIA H200", (9, 0), 132)
TOLERANCE = 0.05  # relative error of hidden states after several layers of bf16
SHOWN = 4  # variants per line
COLD_BYTES = 160 << 20  # KV bytes read before a page is read again


@dataclass
class Bench:
    """The device to measure on: the GPU, or meta tensors, with which launches only compile."""

    device: torch.device
    results: dict[str, dict[str, float | None]] = field(default_factory=dict)

    @property
    def is_dry(self) -> bool:
        return self.device.type == "meta"

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        """Time all calls together, in microseconds."""
        if not self.is_dry:
            return linear_tune.time_in_graph(calls) * len(calls)
        calls[0]()  # the others launch the same kernels
        return 0.0

    def error(self, got: Tensor, exact: Tensor) -> float:
        """The relative error; NaN if an output was not written."""
        if self.is_dry:
            return 0.0
        return float((got.float() - exact.float()).norm() / exact.float().norm())

    def line(
        self, label: str, base: float, found: dict[str, float | None], note: Callable[[float], str]
    ) -> None:
        """Print the fastest variants of one comparison; None = wrong."""
        self.results[label] = {"built-in": base, **found}
        if self.is_dry:
            return
        right = {name: us for name, us in found.items() if us is not None}
        best = sorted(right.items(), key=lambda item: item[1])
        wrong = [name for name, us in found.items() if us is None]
        shown = "  ".join(f"{us - base:+.2f} {name}" for name, us in best[:SHOWN])
        worst = f" … {best[-1][1] - base:+.2f}" if len(best) > SHOWN else ""
        errors = f"  WRONG: {', '.join(wrong)}" if wrong else ""
        print(f"{label:24} {base:8.2f}{note(base)} | {shown}{worst}{errors}", flush=True)


def brief(choice: Variant) -> str:
    """A short name of a choice: gemv(...), skinny(...) or torch, without default fields."""
    if isinstance(choice, Mapping):
        return " ".join(
            f"{key}={int(value) if isinstance(value, int) else brief(value)}"
            for key, value in choice.items()
        )
    if choice is None:
        return "torch"
    values = list(map(int, astuple(choice)))
    defaults = [0, 1, 1, 0] if isinstance(choice, Gemv) else [0, 256]
    while defaults and values[-1] == defaults[-1]:
        values.pop(), defaults.pop()
    kind = "gemv" if isinstance(choice, Gemv) else "skinny"
    return f"{kind}({','.join(map(str, values))})"


# --- linear layers -------------------------------------------------------------------------------


def roles(bench: Bench) -> None:
    """Print microseconds per layer by the kernel of one role; for `head`, per step."""
    for (name, num_layers), by_rows in ROLES.items():
        model = make_model(name, bench.device, num_hidden_layers=num_layers)
        for rows, by_role in by_rows.items():
            step = Step(model, rows, 256, bench.device)
            use(model, None)
            exact = step.hidden()
            largest = step.tokens()[1]
            for role, variants in by_role.items():
                measure = partial(role_time, bench, step, rows, role, exact, largest)
                base = measure(built_in(model, rows, role))
                found = {brief(variant): measure(variant) for variant in variants}
                label = f"{name} {rows} {role}"
                bench.line(label, float("nan") if base is None else base, found, lambda _: "")
        del model, step


def built_in(model: Any, rows: int, role: str) -> Variant:
    if role in ("attention", "together"):
        return {}
    return H100_WINNERS.get((shapes_of(model)[role], bucket_of(rows) or 0))


def role_time(
    bench: Bench,
    step: Step,
    rows: int,
    role: str,
    exact: Tensor,
    largest: Tensor,
    variant: Variant,
) -> float | None:
    """Time one layer of the chain, or its end with the head; None = the results are wrong."""
    changes: Mapping[str, Any] = {}
    choices: Mapping[str, Choice] = {}
    if not isinstance(variant, Mapping):
        choices = {role: variant}
    elif role == "together":
        choices = variant
    else:
        changes = variant
    use(step.model, chooser(step.model, rows, choices))
    try:
        with planned(changes):
            if role == "head":
                error = bench.error(step.tokens()[1], largest)
                return bench.time([step.tokens]) if error < TOLERANCE else None
            error = bench.error(step.hidden(), exact)
            layers = len(step.model.blocks)
            return bench.time([step.hidden]) / layers if error < TOLERANCE else None
    except (RuntimeError, TritonError) as problem:
        print("does not run:", role, rows, variant, str(problem)[:200])
        return None


# --- attention -----------------------------------------------------------------------------------


def attention(bench: Bench) -> None:
    """Print microseconds per layer, and the bandwidth that its KV bytes amount to."""
    for case in ATTENTION:
        kv_bytes = 2 * 2 * case.reqs * case.context * case.kv_heads * case.dim
        count = max(2, -(-COLD_BYTES // kv_bytes))
        shape = (2, 1 + case.reqs * -(-case.context // PAGE), PAGE, case.kv_heads, case.dim)
        caches = [torch.empty(shape, device=bench.device, dtype=BF16) for _ in range(count)]
        for cache in caches:
            cache.normal_()
        common, at = step_metadata(case.reqs, case.tokens, case.context, bench.device)
        size = (case.reqs * case.tokens, (case.group + 2) * case.kv_heads, case.dim)
        query = torch.empty(size, device=bench.device, dtype=BF16).normal_()
        measure = partial(plan_time, bench, case, common, at, query, caches)
        exact = None
        if not bench.is_dry:
            exact = attend(case, common, at, query, caches[0], {"fused": False})
        base = measure({}, exact)
        found = {brief(changes): measure(changes, exact) for changes in case.variants}
        assert base is not None

        def rate(us: float, kv_bytes: int = kv_bytes) -> str:
            return f" {kv_bytes / us / 1e6:.2f} TB/s" if us else ""

        bench.line(case.label, base, found, rate)
        del caches


def attend(
    case: PlanCase,
    common: CommonAttentionMetadata,
    positions: Tensor,
    qkv: Tensor,
    cache: Tensor,
    changes: Mapping[str, Any],
) -> Tensor:
    heads = [case.group * case.kv_heads, case.kv_heads, case.kv_heads]
    rotation = Rotation(positions, angles(case.dim, qkv.device))
    rows = PagedRows(
        common.block_table,
        common.query_start_loc,
        common.seq_lens,
        case.tokens,
        common.slot_mapping,
        arrivals(qkv.device),
    )
    rule = AttentionRule(scale=case.dim**-0.5)
    with planned(changes):
        return rotary_attention(*qkv.split(heads, dim=1), rotation, cache, rows, rule)


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    return torch.zeros(4096, dtype=torch.int32, device=device)


@functools.cache
def angles(dim: int, device: torch.device) -> Tensor:
    return torch.full((2 * MAX_LEN, dim), 0.5**0.5, device=device)


def plan_time(
    bench: Bench,
    case: PlanCase,
    common: CommonAttentionMetadata,
    positions: Tensor,
    qkv: Tensor,
    caches: Sequence[Tensor],
    changes: Mapping[str, Any],
    exact: Tensor | None,
) -> float | None:
    try:
        got = attend(case, common, positions, qkv, caches[0], changes)
        if exact is not None and not bench.error(got, exact) < TOLERANCE:
            return None
        calls = [partial(attend, case, common, positions, qkv, of, changes) for of in caches]
        return bench.time(calls) / len(calls)
    except (RuntimeError, TritonError) as problem:
        print("does not run:", case.label, changes, str(problem)[:200])
        return None


# --- parts of a step -----------------------------------------------------------------------------


def parts(bench: Bench) -> None:
    """Print the time of a step with its head, and the time saved by leaving out each part."""
    for name, num_layers in (("Llama-8B", 8), ("SmolLM2", 30)):
        num_layers = 1 if bench.is_dry else num_layers  # all launch the same kernels
        model = make_model(name, bench.device, num_hidden_layers=num_layers)
        for rows in (1, 256):
            step = Step(model, rows, 256, bench.device)
            use(model, chooser(model, rows, {}))
            base = bench.time([step.tokens])
            saved: dict[str, float | None] = {}
            for part in (*FUNCTIONS, "qkv", "o", "gate_up", "down", "head"):
                with without(part):
                    step.tokens()  # makes the results that later calls reuse
                    saved[part] = bench.time([step.tokens])
            label = f"{name} {rows} step"
            bench.results[label] = {"built-in": base, **saved}
            if not bench.is_dry:
                shown = "  ".join(f"{p} {base - us:.1f}" for p, us in saved.items() if us)
                print(f"{label:24} {base:8.2f} for {num_layers} layers | {shown}", flush=True)
        del model, step


# --- heads ---------------------------------------------------------------------------------------


def heads(bench: Bench) -> None:
    """Print microseconds of logits and tokens, with logits written out and in a single kernel."""
    for name, by_rows in HEADS.items():
        vocab, size = MODELS[name]["vocab_size"], MODELS[name]["hidden_size"]
        count = max(1, (100 << 20) // (2 * vocab * size))
        weights = [
            torch.empty(vocab, size, device=bench.device, dtype=BF16).normal_(0, size**-0.5)
            for _ in range(count)
        ]
        for rows, variants in by_rows.items():
            x = torch.empty(rows, size, device=bench.device, dtype=BF16).normal_()
            exact = head_sample.sample_head(x, weights[0])[1]

            measure = partial(head_time, bench, x, weights, exact)
            base = measure(None)
            assert base is not None
            found = {brief(choice): measure(choice) for choice in variants}
            product = [partial(torch.nn.functional.linear, x, weight) for weight in weights] * 4
            found["logits alone, torch"] = bench.time(product) / len(product)
            bench.line(f"{name} {rows} head", base, found, lambda _: "")
        del weights


def head_time(
    bench: Bench, x: Tensor, weights: Sequence[Tensor], exact: Tensor, choice: Choice
) -> float | None:
    run = partial(head_sample.sample_head, x, draws=None, choice=choice)
    try:
        if not bench.error(run(weight=weights[0])[1], exact) < TOLERANCE:
            return None
    except (RuntimeError, TritonError) as problem:
        print("does not run:", len(x), choice, str(problem)[:200])
        return None
    calls = [partial(run, weight=weight) for weight in weights] * max(1, 4 // len(weights))
    return bench.time(calls) / len(calls)


# --- the program ---------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Bench], None]] = {
    "roles": roles,
    "attention": attention,
    "parts": parts,
    "heads": heads,
}


def compile_all(names: Sequence[str], workers: int) -> None:
    """Compile in this process, which must not have used the GPU."""
    bench, executor = Bench(torch.device("meta")), ForkingExecutor(workers)
    with torch.inference_mode(), without_gpu(H200), compiling_only(executor) as kinds:
        for name in names:
            PARTS[name](bench)
    print(f"{len(kinds)} kinds of kernels", flush=True)


def main(arguments: list[str]) -> None:
    target = None
    if "--json" in arguments:
        at = arguments.index("--json")
        target = arguments[at + 1]
        arguments = arguments[:at] + arguments[at + 2 :]
    names = arguments or list(PARTS)
    start = time.monotonic()
    failed = linear_tune.fails_in_fork(partial(compile_all, names, os.cpu_count() or 1))
    assert not failed, "a kernel does not compile"
    print(f"-- compiled: {time.monotonic() - start:.0f} s", flush=True)
    bench = Bench(torch.device("cuda", 0))
    with torch.inference_mode():
        for name in names:
            start = time.monotonic()
            PARTS[name](bench)
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.monotonic() - start:.0f} s", flush=True)
    if target is not None:
        with open(target, "w") as file:
            json.dump(bench.results, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
