"""Prints how much faster the linear kernels for few rows are than torch on this GPU.

    PYTHONPATH=.src python tests/lab/measure_linear.py [layers] [heads] [errors] [steps] [tune]

Without arguments it runs all but `tune`, in under four minutes on an H100. `layers` prints
microseconds by kernel, shape and number of rows, first torch's and then the chosen kernel's.
`heads` compares logits and argmax in two kernels and in one. `errors` compares logits of two layers
of each model with float32, and a graph with eager code. `steps` times a whole decode or verify step
in one graph, by linear back end, with and without dependent launches. `tune` measures all
candidates and saves the fastest on disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import linear_tune
import torch
from torch import Tensor

from slipstream.kernels import launch
from slipstream.kernels.linear import head_sample, linear
from slipstream.kernels.linear.linear_choice import H100_WINNERS, Choice, Gemv, Shape
from slipstream.kernels.linear.linear_tuned import LinearChooser, card_name, create_chooser
from slipstream.kernels.linear.norm_rope import rms_norm
from slipstream.runner.attention.base import (
    AttentionState,
    BuilderSizes,
    CommonAttentionMetadata,
)
from slipstream.runner.attention.triton import TritonBackend
from slipstream.runner.batch.kv_cache import KVCache, make_groups

from chain_step import BF16, make_model, use  # isort: skip
from chain_variants import MODELS  # isort: skip

CUDA = torch.device("cuda", 0)
ROWS = {1: (1,), 16: (2, 8, 16), 32: (32,), 64: (64,)}  # by bucket
_BESIDE_EXPERTS = (  # Qwen3-30B-A3B and gpt-oss-20b
    *(Shape("qkv", 5120, 2048), Shape("o", 2048, 4096), Shape("head", 151936, 2048)),
    *(Shape("qkv", 5120, 2880), Shape("o", 2880, 4096), Shape("head", 201088, 2880)),
)
STEPS = [(1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (64, 1), (256, 1)]  # requests, tokens of each
CONTEXT, PAGE = 256, 16


@contextmanager
def dependent_launches(wanted: bool) -> Iterator[None]:
    os.environ["SLIPSTREAM_PDL"] = str(int(wanted))
    launch.pdl_wanted.cache_clear()
    yield
    del os.environ["SLIPSTREAM_PDL"]
    launch.pdl_wanted.cache_clear()


def layers() -> None:
    """Time each layer alone; for one row, with the norm before qkv and gate_up."""
    print(f"{'layer':28} {'rows':>4} {'torch':>8} {'chosen':>8}  gain  choice")
    for (shape, bucket), choice in H100_WINNERS.items():
        if shape.inputs == 8192:
            continue  # the drafter's, like the target's
        for rows in ROWS[bucket]:
            if bucket == 1 and shape.role in ("qkv", "gate_up"):
                before, after = one_row(shape, choice)
            else:
                timed = linear_tune.measure(shape, rows, [None, choice], CUDA, BF16)
                times = {found: us for us, found in timed}
                before, after = times[None], times.get(choice, float("nan"))
            name = f"{shape.role} {shape.outputs}x{shape.inputs}"
            print(f"{name:28} {rows:4} {before:8.2f} {after:8.2f} {before / after:5.2f}  {choice}")
    sys.stdout.flush()


def one_row(shape: Shape, choice: Choice) -> tuple[float, float]:
    """Time norm, product and activation, in microseconds: (one by one, in a single kernel)."""
    count = max(1, linear_tune.COLD_BYTES // (2 * shape.outputs * shape.inputs))
    weights = [torch.randn(shape.outputs, shape.inputs, device=CUDA).to(BF16) for _ in range(count)]
    x = torch.randn(1, shape.inputs, device=CUDA).to(BF16)
    norm = (torch.ones(shape.inputs, device=CUDA, dtype=BF16), 1e-5)

    def call(of: Choice, weight: Tensor) -> Tensor:
        inside = norm if isinstance(of, Gemv) else None
        y = x if inside else rms_norm(x, *norm)
        if shape.role == "gate_up":
            return linear.gated_linear(y, weight, None, "silu", of, inside)
        return linear.linear(y, weight, None, of, inside)

    def measure(of: Choice) -> float:
        calls = [partial(call, of, weight) for weight in weights]
        return linear_tune.time_in_graph(calls * -(-linear_tune.MIN_CALLS // count))

    return measure(None), measure(choice)


def heads() -> None:
    """Time head and argmax with torch's logits, the chosen kernel's logits, and none written."""
    print(f"{'head':20} {'rows':>4} {'torch':>8} {'kernel':>8} {'fused':>8}  same tokens")
    for size in MODELS.values():
        shape = Shape("head", size["vocab_size"], size["hidden_size"])
        weight = torch.randn(shape.outputs, shape.inputs, device=CUDA).to(BF16)
        for rows in (1, 4, 8, 32):
            choice = create().choose(shape, rows)
            x = torch.randn(rows, shape.inputs, device=CUDA).to(BF16)
            calls = [
                partial(written_out, x, weight, None),
                partial(written_out, x, weight, choice),
                partial(head_sample.sample_head, x, weight, None, choice),
            ]
            times = [linear_tune.time_in_graph([call] * 8) for call in calls]
            same = torch.equal(calls[1](), calls[2]()[0])
            name = f"{shape.outputs}x{shape.inputs}"
            row = " ".join(f"{us:8.2f}" for us in times)
            print(f"{name:20} {rows:4} {row}  {same}")
    sys.stdout.flush()


def written_out(x: Tensor, weight: Tensor, choice: Choice) -> Tensor:
    return linear.linear(x, weight, None, choice).argmax(-1)


def create() -> LinearChooser:
    chooser = create_chooser("auto", CUDA, BF16)
    assert chooser is not None, "auto means torch on this GPU: run `tune` first"
    return chooser


class Step:
    """A decode or verify step of `reqs` requests at CONTEXT tokens, argmax included."""

    def __init__(self, model: Any, reqs: int, tokens: int, dtype: torch.dtype = BF16) -> None:
        self.model, rows = model, reqs * tokens
        groups = make_groups(model.attention_layers())
        pages = CONTEXT // PAGE + 1
        cache = KVCache(groups, 1 + reqs * pages, PAGE, dtype, CUDA)
        for tensor in {id(t): t for t in cache.attention_state([]).kv_caches.values()}.values():
            tensor.normal_()
        make = torch.Generator().manual_seed(reqs)
        order = (torch.randperm(reqs * pages, generator=make) + 1).int()
        table = order.view(reqs, pages).to(CUDA)
        at = torch.arange(CONTEXT - tokens, CONTEXT).repeat(reqs).to(CUDA)  # positions
        of = torch.arange(reqs, device=CUDA).repeat_interleave(tokens)
        starts = torch.arange(0, rows + 1, tokens, dtype=torch.int32)
        lens = torch.full((reqs,), CONTEXT, dtype=torch.int32)
        slots = table[of, at // PAGE].long() * PAGE + at % PAGE
        common = CommonAttentionMetadata(
            reqs, rows, tokens, CONTEXT, starts.to(CUDA), starts, lens.to(CUDA), lens, table, slots
        )
        builders = [
            TritonBackend().create_builder(
                group.layers, BuilderSizes(PAGE, reqs, rows, CONTEXT, dtype, CUDA)
            )
            for group in groups
        ]
        self.state: AttentionState = cache.attention_state([b.build(common) for b in builders])
        self.positions = at
        vocab = model.config.vocab_size
        self.ids = torch.randint(0, vocab, (rows,), generator=make, dtype=torch.int32).to(CUDA)

    def logits(self) -> Tensor:
        hidden, _ = self.model(self.ids, self.positions, self.state)
        out: Tensor = self.model.compute_logits(hidden)
        return out

    def run(self) -> Tensor:
        return self.logits().argmax(-1)


def steps() -> None:
    """Print milliseconds of whole steps."""
    print(f"{'step':24} {'torch':>8} {'+ PDL':>8} {'kernels':>8} {'+ PDL':>8}  gain")
    for name in MODELS:
        model = make_model(name, CUDA)
        for reqs, tokens in STEPS:
            step, times = Step(model, reqs, tokens), []
            for chooser in (None, create()):
                use(model, chooser)
                for wanted in (False, True):
                    with dependent_launches(wanted):
                        times.append(linear_tune.time_in_graph([step.run]) / 1e3)
            label = f"{name} {reqs} x {tokens}"
            row = " ".join(f"{ms:8.4f}" for ms in times)
            print(f"{label:24} {row} {times[0] / times[3]:5.3f}", flush=True)
        del model
        torch.cuda.empty_cache()


def errors() -> None:
    """Print the errors of logits against float32, and whether a graph's bits equal eager code's."""
    print(f"{'logits of 2 layers':24} {'torch':>9} {'kernels':>9}  graph == eager, 5 replays")
    for name in MODELS:
        model = make_model(name, CUDA, num_hidden_layers=2)
        exact = make_model(name, CUDA, torch.float32, num_hidden_layers=2)
        for target, source in zip(exact.buffers(), model.buffers(), strict=True):
            target.copy_(source)
        for reqs, tokens in STEPS[:6]:
            step, reference = Step(model, reqs, tokens), Step(exact, reqs, tokens, torch.float32)
            caches = zip(
                reference.state.kv_caches.values(), step.state.kv_caches.values(), strict=True
            )
            for target, source in caches:
                target.copy_(source)
            expected = reference.logits()
            found = []
            for chooser in (None, create()):
                use(model, chooser)
                found.append(float((step.logits().float() - expected).norm() / expected.norm()))
            print(f"{name} {reqs} x {tokens}".ljust(24), *(f"{e:9.5f}" for e in found), end="  ")
            print(replays_equal(step), flush=True)
        del model, exact
        torch.cuda.empty_cache()


def replays_equal(step: Step) -> bool:
    eager = step.logits()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.logits()  # stays in the graph's memory
    same = True
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        same = same and torch.equal(out, eager)
    return same


def tune() -> None:
    """Measure all candidates for the shapes of the built-in table and of models with experts."""
    shapes = sorted({*(shape for shape, _ in H100_WINNERS), *_BESIDE_EXPERTS}, key=str)
    for (shape, rows), choice in linear_tune.tune(shapes, CUDA, BF16).items():
        mark = "" if choice == H100_WINNERS.get((shape, rows)) else "  (not the built-in one)"
        print(f"{shape.role} {shape.outputs}x{shape.inputs}", rows, choice, mark, flush=True)


if __name__ == "__main__":
    print(card_name(CUDA), "torch", torch.__version__)
    with torch.inference_mode():
        for part in sys.argv[1:] or ["layers", "heads", "errors", "steps"]:
            start = time.monotonic()
            globals()[part]()
            print(f"-- {part}: {time.monotonic() - start:.0f} s\n", flush=True)
