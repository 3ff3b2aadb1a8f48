"""Prints how long a layer of experts takes on this GPU, by part, and the best tiles.

    PYTHONPATH=.src python tests/lab/measure_moe.py [parts] [tiles] [formats] [packed-tiles]
        [--shape qwen3-30b-a3b] [--kinds fp8b,int4]

`parts` prints microseconds of the router's product, the choice of experts and the experts of one
layer, the gigabytes of the experts that the rows touch, and the share of the peak bandwidth (set it
with --peak TB/s; tests/lab/peak_bandwidth.py measures it). `tiles` tries tile sizes for both
products at each number of rows. `formats` compares the experts in quantised formats with bf16's:
microseconds, and how many times faster; `packed-tiles` tries their tile sizes.

Calls are timed in one graph over several layers, so that weights are never in the cache. Rows
choose their experts at random, as tokens of different requests do.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from typing import Any

import linear_tune
import torch
from torch import Tensor

from slipstream.kernels.linear.experts import ExpertWeights, PackedExperts, Routing
from slipstream.kernels.linear.linear import linear_parts
from slipstream.kernels.linear.linear_choice import Shape
from slipstream.kernels.linear.moe import expert_parts, select_experts
from slipstream.kernels.linear.triton.expert_rows import rows_of_tile
from slipstream.kernels.linear.triton.moe import Tiles, tiles_of
from slipstream.kernels.linear.triton.moe import expert_parts as with_tiles
from slipstream.kernels.packed.triton.packed_experts import expert_parts as packed_parts
from slipstream.kernels.quant.tiled import tile
from slipstream.runner.models.moe import _FEW_ROWS, _MANY_ROWS

from measure_packed import FORMATS, random_packed  # isort: skip
from shapes import SHAPES  # isort: skip

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAYERS = 3  # of different weights, larger than the cache together
Chosen = tuple[Tensor, Tensor]  # weights and ids of the experts of each row


class Layer:
    """Random weights of a layer of experts."""

    def __init__(self, name: str) -> None:
        shape = SHAPES[name]
        self.count = shape.get("num_experts") or shape["num_local_experts"]
        self.top_k, self.hidden = shape["num_experts_per_tok"], shape["hidden_size"]
        self.inner = shape.get("moe_intermediate_size") or shape["intermediate_size"]
        biases: dict[str, Tensor] = {}
        if name.startswith("gpt-oss"):
            biases["gate_up_bias"] = self._random(self.count, 2 * self.inner)
            biases["down_bias"] = self._random(self.count, self.hidden)
        self.experts = ExpertWeights(
            self._random(self.count, 2 * self.inner, self.hidden),
            self._random(self.count, self.hidden, self.inner),
            activation="clamped_swiglu" if biases else "silu",
            **biases,
        )
        self.gate = self._random(self.count, self.hidden)

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=CUDA).normal_(0, 0.02)

    def route(self, x: Tensor) -> Tensor:
        """The router's logits."""
        choice = _FEW_ROWS if x.shape[0] <= _FEW_ROWS.block_m else _MANY_ROWS
        return linear_parts(x, self.gate, None, choice)

    def chosen(self, rows: int) -> Chosen:
        """Experts of random rows."""
        logits = torch.randn(rows, self.count, device=CUDA)
        return select_experts(logits, Routing(self.top_k, renormalise=True))

    def bytes_of(self, chosen: Chosen) -> int:
        """Bytes of the weights of the experts that rows touch."""
        return 2 * 3 * self.inner * self.hidden * chosen[1].unique().numel()


def timed(calls: list[partial[object]]) -> float:
    """Microseconds of one call."""
    return linear_tune.time_in_graph(calls * max(1, 24 // len(calls)))


def parts(name: str, peak: float) -> None:
    """Time the parts of a layer."""
    layers = [Layer(name) for _ in range(LAYERS)]
    print(f"{name}\n rows   router   choice  experts  touched   share")
    for rows in ROWS:
        x = torch.randn(rows, layers[0].hidden, device=CUDA).to(BF16)
        chosen = [layer.chosen(rows) for layer in layers]
        logits = layers[0].route(x)
        routing = Routing(layers[0].top_k, renormalise=True)
        router = timed([partial(layer.route, x) for layer in layers])
        choice = timed([partial(select_experts, logits, routing)])
        pairs = list(zip(layers, chosen, strict=True))
        experts = timed([partial(expert_parts, x, layer.experts, *own) for layer, own in pairs])
        touched = sum(layer.bytes_of(own) for layer, own in pairs) / LAYERS
        share = touched / experts / 1e6 / peak
        us = f"{router:8.2f} {choice:8.2f} {experts:8.2f}"
        print(f"{rows:5} {us} {touched / 1e9:7.3f}G {share:6.1%}")
        sys.stdout.flush()


def tiles(name: str) -> None:
    """Time both products with each tile size, and print the fastest."""
    layers = [Layer(name) for _ in range(LAYERS)]
    sizes = [Tiles(*each) for each in itertools.product((64, 128), (64, 128), (3, 4, 5), (4, 8))]
    for rows in ROWS[1:]:
        x = torch.randn(rows, layers[0].hidden, device=CUDA).to(BF16)
        pairs = [(layer, layer.chosen(rows)) for layer in layers]
        block_m = rows_of_tile(rows, layers[0].top_k, layers[0].count)
        usual = (tiles_of(block_m, True), tiles_of(block_m, False))
        found = [("as chosen", measure(x, pairs, usual), usual)]
        for which, size in itertools.product((0, 1), sizes):
            tried = (size, usual[1]) if which == 0 else (usual[0], size)
            try:
                us = measure(x, pairs, tried)
            except Exception:  # too much shared memory, or a size that Triton cannot compile
                continue
            found.append((("gate_up", "down")[which], us, tried))
        print(f"{name}, {rows} rows, {block_m} rows a tile")
        print(f"  {found[0][1]:8.2f} {found[0][0]} {usual}")
        for part in ("gate_up", "down"):
            best = [(us, tried) for kind, us, tried in found if kind == part]
            for us, tried in sorted(best, key=lambda each: each[0])[:3]:
                print(f"  {us:8.2f} {part} {tried[part == 'down']}")
        sys.stdout.flush()


def measure(x: Tensor, pairs: list[tuple[Layer, Chosen]], size: tuple[Tiles, Tiles]) -> float:
    """Microseconds of the experts of a layer with these tiles."""
    calls = [partial(with_tiles, x, layer.experts, *own, tiles=size) for layer, own in pairs]
    return timed(calls)


class PackedLayer(Layer):
    """The same with quantised experts: a `kind` of `measure_packed`'s formats."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name)
        wide, stacks = self.experts, []
        for rows, columns in ((2 * self.inner, self.hidden), (self.hidden, self.inner)):
            shape = Shape("other", self.count * rows, columns)
            stacks.append(tile(random_packed(kind, shape, CUDA)))
        biases = wide.gate_up_bias, wide.down_bias
        self.packed = PackedExperts(*stacks, self.count, *biases, wide.activation)
        del self.experts

    @property
    def nbytes(self) -> int:
        return self.packed.gate_up.nbytes + self.packed.down.nbytes


def formats(name: str, kinds: list[str], peak: float) -> None:
    """Time the experts of a layer in each format, beside bf16's."""
    plain = [Layer(name) for _ in range(LAYERS)]
    chosen = {rows: [layer.chosen(rows) for layer in plain] for rows in ROWS}
    xs = {rows: torch.randn(rows, plain[0].hidden, device=CUDA).to(BF16) for rows in ROWS}
    wide = {}
    for rows in ROWS:
        pairs = zip(plain, chosen[rows], strict=True)
        wide[rows] = timed([partial(expert_parts, xs[rows], x.experts, *own) for x, own in pairs])
    del plain
    print(f"{name}: us of bf16, then of each format and how many times faster it is; share of peak")
    for kind in kinds:
        layers = [PackedLayer(name, kind) for _ in range(LAYERS)]
        for rows in ROWS:
            own = list(zip(layers, chosen[rows], strict=True))
            us = timed([partial(packed_parts, xs[rows], each.packed, *ids) for each, ids in own])
            touched = sum(ids[1].unique().numel() for ids in chosen[rows]) / LAYERS
            share = layers[0].nbytes * touched / layers[0].count / us / 1e6 / peak
            faster = wide[rows] / us
            print(f"{kind:6} {rows:4} rows {wide[rows]:8.2f} {us:8.2f} {faster:5.2f}x {share:6.1%}")
            sys.stdout.flush()


def packed_tiles(name: str, kinds: list[str]) -> None:
    """Time both products of quantised experts with each tile size, and print the fastest."""
    sizes = [
        *(Tiles(16, 0, stages, warps) for stages in (4, 6) for warps in (1, 2)),
        *(Tiles(32, 0, stages, warps) for stages in (3, 4, 6) for warps in (1, 2, 4)),
        *(Tiles(64, 0, stages, 4) for stages in (2, 3, 4, 5)),
        *(Tiles(128, 0, stages, warps) for stages in (2, 3, 4) for warps in (4, 8)),
    ]
    for kind in kinds:
        layers = [PackedLayer(name, kind) for _ in range(LAYERS)]
        for rows in ROWS:
            x = torch.randn(rows, layers[0].hidden, device=CUDA).to(BF16)
            pairs = [(layer, layer.chosen(rows)) for layer in layers]

            def us_of(tiles: Any, x: Tensor = x, pairs: Any = pairs) -> float:
                return timed(
                    [partial(packed_parts, x, p.packed, *o, tiles=tiles) for p, o in pairs]
                )

            print(f"{kind}, {rows} rows: {us_of(None):8.2f} us as chosen")
            best: list[Tiles | None] = [Tiles(64, 0, 3, 4), Tiles(64, 0, 3, 4)]
            for which in (0, 1):
                found = []
                for size in sizes:
                    tried = tuple(size if which == i else best[i] for i in (0, 1))
                    try:
                        found.append((us_of(tried), size))
                    except Exception:  # too much shared memory, or a tile that cannot be compiled
                        continue
                found.sort(key=lambda each: each[0])
                best[which] = found[0][1]
                for us, size in found[:3]:
                    print(f"  {us:8.2f} {('gate_up', 'down')[which]} {size}")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="*", default=["parts"], choices=["parts", "tiles", "formats", "packed-tiles"]
    )
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=[*SHAPES])
    parser.add_argument("--peak", type=float, default=4.24, help="TB/s")
    args = parser.parse_args()
    if "parts" in args.what:
        parts(args.shape, args.peak)
    if "tiles" in args.what:
        tiles(args.shape)
    if "formats" in args.what:
        formats(args.shape, args.kinds, args.peak)
    if "packed-tiles" in args.what:
        packed_tiles(args.shape, args.kinds)


if __name__ == "__main__":
    main()
