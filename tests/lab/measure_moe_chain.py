"""Times layers of experts in a chain, as in a decode step, with one thing changed at a time.

    PYTHONPATH=.src python tests/lab/measure_moe_chain.py [chain] [products] [tiles]
        [--shape qwen3-30b-a3b] [--rows 8,32,128]

`chain` prints microseconds of a layer (norm, qkv, o, norm, router, choice, list, gate_up, down) as
the models run it, then the difference that each variant makes: the dtype of the parts of the down
product, programs that compute several tiles of it, and the warp-specialised kernel (`roles`:
columns of a stage x stages). `products` prints microseconds of the routing and of each product
alone, by both kernels, and the products' share of the peak bandwidth. `tiles` tries tile sizes in
the chain.

Layers have separate weights, so that none is in the cache, and run in one graph with dependent
launches. All kernels are compiled first, in parallel and without the GPU. A variant whose experts
differ from the reference is printed as wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import linear_tune
import torch
from torch import Tensor

from slipstream.kernels.compile_ahead import ForkingExecutor, compiling_only, without_gpu
from slipstream.kernels.device import Card
from slipstream.kernels.linear.experts import ExpertWeights, Routing
from slipstream.kernels.linear.grouped.triton.hopper_experts import Form
from slipstream.kernels.linear.linear import linear_parts
from slipstream.kernels.linear.linear_choice import Shape
from slipstream.kernels.linear.linear_tuned import create_chooser
from slipstream.kernels.linear.moe import (
    normed_scores,
    run_experts_reference,
    select_experts,
)
from slipstream.kernels.linear.norm_rope import fused_add_rms_norm
from slipstream.kernels.linear.triton import moe
from slipstream.kernels.linear.triton.expert_rows import rows_of_tile
from slipstream.runner.models.moe import _NORMED_ROWS, router_parts

from shapes import SHAPES  # isort: skip

H200, BF16, EPS = Card("NVIDIA H200", (9, 0), 132), torch.bfloat16, 1e-6
ROWS, LAYERS, REPEATS = (8, 16, 32, 64, 128, 256), 3, 8
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Variant:
    """What differs from the built-in form."""

    name: str
    narrow: int | None = None
    tiles: tuple[moe.Tiles, moe.Tiles] | None = None
    form: Form | None = None  # of the warp-specialised kernel


BASE = Variant("built-in")
VARIANTS = (
    Variant("float32 parts", narrow=1 << 30),
    Variant("narrow parts", narrow=1),
    *(Variant(f"roles {k}x{n}", form=Form(k, n)) for k, n in ((128, 6), (128, 4), (64, 12))),
    Variant("roles, fetch 512", form=Form(fetch=512)),
)


class Layer:
    """Random weights of a layer."""

    def __init__(self, name: str, device: torch.device) -> None:
        shape, self.device = SHAPES[name], device
        self.count = shape.get("num_experts") or shape["num_local_experts"]
        self.top_k, self.hidden = shape["num_experts_per_tok"], shape["hidden_size"]
        self.inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dim = shape.get("head_dim") or self.hidden // heads
        self.wide, self.width = (heads + 2 * kv_heads) * dim, heads * dim
        self.experts = ExpertWeights(
            self._random(self.count, 2 * self.inner, self.hidden),
            self._random(self.count, self.hidden, self.inner),
        )
        self.gate = self._random(self.count, self.hidden)
        self.qkv = self._random(self.wide, self.hidden)
        self.o = self._random(self.hidden, self.width)
        self.gains = torch.ones(2, self.hidden, dtype=BF16, device=device)

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=self.device).normal_(0, 0.02)


@dataclass
class Bench:
    """Layers on a GPU, or on the meta device, where launches only compile."""

    layers: list[Layer]
    peak: float  # TB/s

    def __post_init__(self) -> None:
        layer = self.layers[0]
        self.device, self.is_dry = layer.device, layer.device.type == "meta"
        self.routing = Routing(layer.top_k, renormalise=True)
        self.chooser = create_chooser("auto", self.device, BF16)

    def time(self, calls: Sequence[partial[object]]) -> float:
        """Microseconds of one call."""
        if self.is_dry:
            calls[0]()
            return 1.0
        return linear_tune.time_in_graph(calls)

    def parts(self, x: Tensor, weight: Tensor, role: str) -> Tensor:
        """A linear layer by the kernel that a model chooses."""
        shape = Shape(role, *weight.shape)
        choice = None if self.chooser is None else self.chooser.choose(shape, len(x))
        return linear_parts(x, weight, None, choice)

    def route(
        self, layer: Layer, hidden: Tensor, stream: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Norm the stream and choose the experts: (rows, stream, weights, ids)."""
        if stream.shape[0] <= _NORMED_ROWS:
            norm = (layer.gains[1], EPS)
            x, stream, logits = normed_scores(hidden, stream, norm, layer.gate, None)
        else:
            x, stream = fused_add_rms_norm(hidden, stream, layer.gains[1], EPS)
            logits = router_parts(x, layer.gate, None, False)
        weights, ids = select_experts(logits, self.routing)
        return x, stream, weights, ids

    def experts(
        self, layer: Layer, x: Tensor, weights: Tensor, ids: Tensor, variant: Variant
    ) -> Tensor:
        options = {"narrow": variant.narrow, "tiles": variant.tiles, "form": variant.form}
        return moe.expert_parts(x, layer.experts, weights, ids, **options)

    def chain(self, stream: Tensor, variant: Variant) -> None:
        """All layers once, each with the output of the one before it."""
        hidden = stream
        for layer in self.layers:
            x, stream = fused_add_rms_norm(hidden, stream, layer.gains[0], EPS)
            wide = self.parts(x, layer.qkv, "qkv")
            wide = wide if wide.dim() == 2 else wide[0].to(BF16)
            hidden = self.parts(wide[:, : layer.width].contiguous(), layer.o, "o")
            x, stream, weights, ids = self.route(layer, hidden, stream)
            hidden = self.experts(layer, x, weights, ids, variant)

    def layer_time(self, stream: Tensor, variant: Variant) -> float | None:
        """Microseconds of a layer of the chain; None if the experts are wrong."""
        layer = self.layers[0]
        x, _, weights, ids = self.route(layer, stream, stream)
        got = self.experts(layer, x, weights, ids, variant)
        if not self.is_dry:
            exact = run_experts_reference(x, layer.experts, weights, ids.long()).float()
            if not (got.float().sum(0) - exact).norm() < TOLERANCE * exact.norm():
                return None
        return self.time([partial(self.chain, stream, variant)] * REPEATS) / len(self.layers)

    def touched(self, stream: Tensor) -> float:
        """Experts of a layer that rows touch, on average."""
        if self.is_dry:
            return 1.0
        found = [self.route(layer, stream, stream)[3] for layer in self.layers]
        return sum(ids.unique().numel() for ids in found) / len(found)

    def rows(self, count: int) -> Tensor:
        torch.manual_seed(count)
        return torch.empty(count, self.layers[0].hidden, dtype=BF16, device=self.device).normal_()


def chain(bench: Bench, rows: Sequence[int]) -> None:
    for count in rows:
        compare(bench, bench.rows(count), VARIANTS, shown=len(VARIANTS))


def tiles(bench: Bench, rows: Sequence[int]) -> None:
    layer = bench.layers[0]
    sizes = [*itertools.product((64, 128), (64, 128), (3, 4, 5), (4, 8)), (128, 256, 2, 8)]
    for count in rows:
        block_m = rows_of_tile(count, layer.top_k, layer.count)
        usual = (moe.tiles_of(block_m, True), moe.tiles_of(block_m, False))
        variants = []
        for which, size in itertools.product((0, 1), sizes):
            block_n, block_k, stages, _ = size
            if (block_n * (2 - which) + block_m) * block_k * 2 * stages > 220 << 10:
                continue
            own = moe.Tiles(*size)
            both = (own, usual[1]) if which == 0 else (usual[0], own)
            variants.append(Variant(f"{('gate_up', 'down')[which]} {size}", tiles=both))
        compare(bench, bench.rows(count), variants, shown=8)


def compare(bench: Bench, stream: Tensor, variants: Sequence[Variant], shown: int) -> None:
    """Print what the built-in form takes, and what the fastest variants change."""
    base = bench.layer_time(stream, BASE)
    assert base is not None, "the built-in form is wrong"
    found = [(bench.layer_time(stream, each), each.name) for each in variants]
    again = bench.layer_time(stream, BASE)
    if bench.is_dry:
        return
    wrong = [name for us, name in found if us is None]
    best = sorted((us - base, name) for us, name in found if us is not None)[:shown]
    print(f"{stream.shape[0]:4} rows {base:8.2f} us, again {again:8.2f}")
    print("    " + "  ".join(f"{us:+.2f} {name}" for us, name in best))
    if wrong:
        print("    WRONG:", ", ".join(wrong))


def products(bench: Bench, rows: Sequence[int]) -> None:
    layer = bench.layers[0]
    size = 2 * layer.inner * layer.hidden  # bytes of an expert's smallest matrix
    if not bench.is_dry:
        print(
            "rows  routing   gate_up  share     down  share; with roles of warps; experts touched"
        )
    for count in rows:
        stream = bench.rows(count)
        route = [partial(bench.route, each, stream, stream) for each in bench.layers]
        routing = bench.time(route * REPEATS)
        touched, times = bench.touched(stream), []
        for form, gated in itertools.product((None, Form()), (True, False)):
            calls = []
            for each in bench.layers:
                x, _, weights, ids = bench.route(each, stream, stream)
                work = moe.work_for(weights, ids, layer.count, 128)
                calls.append(partial(one_product, gated, form, work, x, each, weights, ids))
            times.append(bench.time(calls * REPEATS))
        sizes = (2 * size * touched, size * touched) * 2
        line = "  ".join(
            f"{us:8.2f} {nbytes / us / 1e6 / bench.peak:6.1%}"
            for us, nbytes in zip(times, sizes, strict=True)
        )
        if not bench.is_dry:
            print(f"{count:4} {routing:8.2f}  {line} {touched:8.1f}", flush=True)


def one_product(
    gated: bool,
    form: Form | None,
    work: moe.Work,
    x: Tensor,
    layer: Layer,
    weights: Tensor,
    ids: Tensor,
) -> None:
    """Only one of the two products, of rows that have been listed."""

    def one(x: Tensor, inner_size: int, _work: object, multiply: object, *_: object) -> Tensor:
        inner = x.new_empty(work.num_rows * work.top_k, inner_size)
        out = x.new_empty(work.top_k, *x.shape, dtype=torch.float32)
        multiply(gated, *((x, inner) if gated else (inner, out)))  # type: ignore[operator]
        return out

    with patch.multiple(moe, both_products=one, work_for=lambda *_: work):
        moe.expert_parts(x, layer.experts, weights, ids, form=form)


PARTS = {"chain": chain, "products": products, "tiles": tiles}


def run(args: argparse.Namespace, device: torch.device) -> None:
    bench = Bench([Layer(args.shape, device) for _ in range(LAYERS)], args.peak)
    for name in args.what:
        start = time.monotonic()
        PARTS[name](bench, args.rows)
        if not bench.is_dry:
            print(f"-- {name}: {time.monotonic() - start:.0f} s", flush=True)


def compile_all(args: argparse.Namespace) -> None:
    """Compile in a fork of this process, which must not have used the GPU."""
    start, child = time.monotonic(), os.fork()
    if child == 0:
        status = 1
        try:
            executor = ForkingExecutor(args.jobs)
            with without_gpu(H200), compiling_only(executor) as kinds:
                run(args, torch.device("meta"))
            print(f"{len(kinds)} kinds of kernels", flush=True)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "a kernel does not compile"
    print(f"-- compiled: {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["chain", "products"], choices=[*PARTS])
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=[*SHAPES])
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=ROWS)
    parser.add_argument("--peak", type=float, default=4.24, help="TB/s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="compile only")
    args = parser.parse_args()
    with torch.inference_mode():
        compile_all(args)
        if not args.dry:
            run(args, torch.device("cuda", 0))


if __name__ == "__main__":
    main()
