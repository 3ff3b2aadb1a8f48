"""Experts of MXFP4 numbers on a GPU equal the same experts in float32, and graphs replay them."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.experts import PackedExperts
from slipstream.kernels.linear.moe import run_experts_reference
from slipstream.kernels.packed.experts import packed_expert_parts
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.tiled import has_kernels, tile
from slipstream.runner.graphs.manager import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
COUNT, TOP_K, HIDDEN, INNER = 32, 4, 2880, 2880  # gpt-oss-20b


def random_matrix(rows: int, columns: int) -> PackedWeight:
    values = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 122, (rows, columns // 32), dtype=torch.uint8, device="cuda")
    return PackedWeight("fp4", values, scales, columns, 32)


@pytest.fixture(scope="module")
def experts() -> PackedExperts:
    gate_up = random_matrix(COUNT * 2 * INNER, HIDDEN)
    if not has_kernels(gate_up, gate_up.device):
        pytest.skip("needs a Hopper GPU")
    down = random_matrix(COUNT * HIDDEN, INNER)
    sizes = ((COUNT, 2 * INNER), (COUNT, HIDDEN))
    biases = [torch.randn(size, device="cuda").bfloat16() for size in sizes]
    return PackedExperts(tile(gate_up), tile(down), COUNT, *biases, "clamped_swiglu")


@pytest.mark.parametrize("rows", [1, 8, 33, 128, 256, 1000])
def test_experts_equal_wide_ones(rows: int, experts: PackedExperts) -> None:
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(rows, COUNT, device="cuda").argsort(1)[:, :TOP_K].int()
    weights = torch.rand(rows, TOP_K, device="cuda")
    wide = experts.widened(torch.float32)
    expected = run_experts_reference(x.float(), wide, weights, ids.long())

    def run() -> torch.Tensor:
        parts = packed_expert_parts(x, experts, weights, ids)
        return parts if parts.dim() == 2 else parts.sum(0)

    assert relative_error(run(), expected) < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(float("nan"))
    graph.replay()
    assert relative_error(out, expected) < 1e-2
