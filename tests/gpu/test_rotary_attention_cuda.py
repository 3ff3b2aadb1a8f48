"""The kernel that fuses rotary embedding, KV write and attention equals the separate kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.attention.test_triton_rotary_attention import case, expected_of  # noqa: E402
from tests.kernels.attention_inputs import rotary_inputs  # noqa: E402

from slipstream.kernels.attention.rotary_attention import rotary_attention  # noqa: E402
from slipstream.kernels.attention.triton import attention_plan  # noqa: E402
from slipstream.runner.graphs.manager import relative_error  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def on_gpu(args: dict[str, Any]) -> dict[str, Any]:
    qkv = torch.cat([args["query"], args["key"], args["value"]], dim=-2).cuda()
    counts = [args[name].shape[-2] for name in ("query", "key", "value")]
    query, key, value = qkv.split(counts, dim=-2)
    moved = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in args.items()}
    return moved | {"query": query, "key": key, "value": value}


@pytest.mark.parametrize("num_parts", [0, 4])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (64, 8)])  # the last with sinks, as gpt-oss
@pytest.mark.parametrize("num_reqs", [1, 2, 5, 16, 40, 70, 100])  # one for each kind of tiling
def test_the_fused_kernel_equals_the_separate_ones(
    num_reqs: int, heads: tuple[int, int], query_len: int, num_parts: int
) -> None:
    """Also holds in 100 launches of a graph with dependent launches.

    The last program of a row must see the partial results of all others."""
    dim = 128 if heads[0] == 32 else 64
    lens = [int(n) for n in torch.randint(query_len, 700, (num_reqs,))] + [0]
    page = 16 if num_reqs >= 40 else 4
    args = case(query_len, lens, heads, dim, dim, num_parts, torch.bfloat16, page)
    args["cos_sin_cache"] = torch.randn(1024, dim)
    names = ("query", "key", "value", "kv_cache")
    options: dict[str, Any] = {}
    if heads[0] == 64:
        window = 128 if num_reqs % 2 else None
        options = {"sinks": torch.randn(64) * 3, "sliding_window": window}
    wide = {k: v.float() if k in names else v for k, v in args.items()}
    expected, cache = expected_of(wide, options)
    rounded = relative_error(expected_of(args, options)[0], expected)  # up to 1 % with few keys
    moved = on_gpu(args)
    if options:
        options["sinks"] = options["sinks"].cuda()
    inputs = rotary_inputs(**moved, **options)
    assert attention_plan.plan_for(moved["query"], moved["kv_cache"], *inputs[5:]).fused
    out = rotary_attention(*inputs)
    assert relative_error(out, expected.cuda()) < max(8e-3, 1.5 * rounded)
    assert relative_error(moved["kv_cache"].nan_to_num(), cache.nan_to_num().cuda()) < 4e-3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [rotary_attention(*inputs) for _ in range(10)]
    for _ in range(10):
        for one in outputs:
            one.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, out) for one in outputs)
    assert not moved["arrivals"].any()
