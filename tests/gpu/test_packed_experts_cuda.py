"""Quantised experts on a GPU equal the same experts in float32, and graphs replay them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.experts import ExpertWeights, PackedExperts
from slipstream.kernels.linear.moe import run_experts_reference
from slipstream.kernels.packed.experts import packed_expert_parts, packed_experts
from slipstream.kernels.quant.tiled import has_kernels, tile
from slipstream.runner.graphs.manager import relative_error

from ..kernels.quant.random_weights import random_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@dataclass(frozen=True)
class Layer:
    """A layer's experts, quantised and in float32."""

    packed: PackedExperts
    wide: ExpertWeights
    top_k: int

    @property
    def hidden(self) -> int:
        return self.packed.gate_up.shape[1]

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random rows [T, H], and the weights [T, k] and ids [T, k] of their experts."""
        x = torch.randn(count, self.hidden, device="cuda").bfloat16()
        ids = torch.rand(count, self.packed.num_experts, device="cuda").argsort(1)
        weights = torch.rand(count, self.top_k, device="cuda")
        return x, weights, ids[:, : self.top_k].int()


SIZES = {  # experts, hidden, inner size, experts of a row
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "gpt-oss-20b": (32, 2880, 2880, 4),
}
LAYERS = [
    *(
        ("Qwen3-30B-A3B", name)
        for name in (
            *("fp8 blocks", "fp8 rows", "int8 rows", "int4 128", "int4 128 zeros"),
            *("int4 32 offsets", "int8 16", "mxfp4", "nvfp4"),
        )
    ),
    ("gpt-oss-20b", "mxfp4"),
    ("Qwen3-30B-A3B", "mxfp4 narrow"),
    ("gpt-oss-20b", "mxfp4 narrow"),
]


@pytest.fixture(scope="module", params=LAYERS, ids=lambda layer: f"{layer[1]}, {layer[0]}")
def layer(request: pytest.FixtureRequest) -> Iterator[Layer]:
    model, name = request.param
    count, hidden, inner, top_k = SIZES[model]
    narrow = name.endswith(" narrow")  # up to 256 rows by the kernels of `hopper_experts`
    name = name.removesuffix(" narrow")
    gate_up = random_weight(name, count * 2 * inner, hidden, "cuda")
    if not has_kernels(gate_up, gate_up.device):
        pytest.skip("needs a Hopper GPU")
    down = random_weight(name, count * hidden, inner, "cuda", seed=1)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    activation = "silu"
    if model.startswith("gpt-oss"):
        biases = (
            torch.randn(count, 2 * inner, device="cuda").bfloat16(),
            torch.randn(count, hidden, device="cuda").bfloat16(),
        )
        activation = "clamped_swiglu"
    stacks = tile(gate_up, narrow), tile(down, narrow)
    packed = PackedExperts(*stacks, count, *biases, activation)
    del gate_up, down
    yield Layer(packed, packed.widened(torch.float32), top_k)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", [1, 2, 8, 33, 128, 256, 1000])
def test_experts_equal_wide_ones(rows: int, layer: Layer) -> None:
    x, weights, ids = layer.rows(rows)
    expected = run_experts_reference(x.float(), layer.wide, weights, ids.long())

    def run() -> Tensor:
        parts = packed_expert_parts(x, layer.packed, weights, ids)
        return parts if parts.dim() == 2 else parts.sum(0)

    assert relative_error(run(), expected) < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(float("nan"))
    graph.replay()
    assert relative_error(out, expected) < 1e-2


@pytest.mark.parametrize("rows", [1, 40, 600])
def test_absent_experts_are_left_out(rows: int, layer: Layer) -> None:
    x, weights, ids = layer.rows(rows)
    ids = torch.where(torch.rand_like(weights) < 0.5, ids, -1)
    expected = run_experts_reference(x.float(), layer.wide, weights, ids)
    got = packed_experts(x, layer.packed, weights, ids, absent=True)
    assert relative_error(got, expected) < 1e-2


def test_the_same_rows_have_the_same_bits_in_every_run(layer: Layer) -> None:
    """With dependent launches, too: nothing is read before it is written."""
    x, weights, ids = layer.rows(16)
    first = packed_expert_parts(x, layer.packed, weights, ids)
    for _ in range(20):
        assert torch.equal(packed_expert_parts(x, layer.packed, weights, ids), first)
