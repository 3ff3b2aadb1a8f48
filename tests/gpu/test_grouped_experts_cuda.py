"""The experts' products by warps with roles, and by programs of several tiles, equal the reference,
also replayed in a graph for other rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.experts import ExpertWeights
from slipstream.kernels.linear.moe import run_experts_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
EXPERTS, TOP_K = 128, 8
Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, weights, ids) -> parts


def choose(rows: int, skewed: bool) -> tuple[Tensor, Tensor]:
    """Weights and ids of the experts of each row; if `skewed`, all rows choose the same four."""
    ids = torch.rand(rows, EXPERTS, device="cuda").argsort(1)[:, :TOP_K]
    if skewed:
        ids = torch.rand(rows, EXPERTS - 4, device="cuda").argsort(1)[:, :TOP_K] + 4
        ids[:, :4] = torch.arange(4, device="cuda")
    return torch.rand(rows, TOP_K, device="cuda"), ids.int()


@pytest.fixture(scope="module")
def experts() -> ExpertWeights:
    """Of Qwen3-30B-A3B's sizes."""
    torch.manual_seed(0)
    gate_up = torch.randn(EXPERTS, 1536, 2048, device="cuda").mul_(2048**-0.5).bfloat16()
    down = torch.randn(EXPERTS, 2048, 768, device="cuda").mul_(768**-0.5).bfloat16()
    return ExpertWeights(gate_up, down)


def check(run: Run, experts: ExpertWeights, rows: int) -> None:
    x = torch.randn(rows, 2048, device="cuda").bfloat16()
    weights, ids = choose(rows, False)
    run(x, weights, ids)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = run(x, weights, ids)
    for skewed in (False, True, False):
        x.normal_()
        for held, new in zip((weights, ids), choose(rows, skewed), strict=True):
            held.copy_(new)
        parts.fill_(float("nan"))
        graph.replay()
        exact = run_experts_reference(x, experts, weights, ids.long()).float()
        error = (parts.float().sum(0) - exact).norm(dim=1) / exact.norm(dim=1)
        assert float(error.max()) < 1e-2


@pytest.mark.parametrize("rows", [2, 9, 16, 33, 128, 256])
@pytest.mark.parametrize("sizes", [(128, 6, 0), (64, 12, 0), (128, 3, 512)])
def test_warps_with_roles(rows: int, sizes: tuple[int, int, int], experts: ExpertWeights) -> None:
    from slipstream.kernels.linear.grouped.triton.hopper_experts import Form
    from slipstream.kernels.linear.triton import moe

    form = Form(*sizes)
    work = moe.work_for(*choose(rows, False), EXPERTS, 128)
    x = torch.empty(rows, 2048, device="cuda", dtype=torch.bfloat16)
    assert moe._specialised(x, experts, work, form) is not None
    run = partial(moe.expert_parts, form=form)
    check(lambda x, weights, ids: run(x, experts, weights, ids), experts, rows)
