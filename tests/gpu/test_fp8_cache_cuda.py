"""An fp8 KV cache on a GPU: rounding, the fused kernel, and text with drafts and in graphs.

`test_attention_cuda` tests attention over such a cache in eager runs and in graphs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.attention.test_fp8_cache import assert_codes_close, stored  # noqa: E402
from tests.kernels.attention.test_triton_rotary_attention import case  # noqa: E402
from tests.kernels.attention_inputs import rotary_inputs  # noqa: E402
from tests.kernels.quant.test_e4m3 import all_bf16  # noqa: E402
from tests.speculators.all_drafters import Drafters  # noqa: E402
from tests.speculators.tiny_engine import TinyEngine, prompts  # noqa: E402

from slipstream.configs.schema import SpeculativeConfig  # noqa: E402
from slipstream.kernels.attention.paged_attention import paged_attention_reference  # noqa: E402
from slipstream.kernels.attention.paged_rows import Fp8Cache  # noqa: E402
from slipstream.kernels.attention.rotary_attention import rotary_attention  # noqa: E402
from slipstream.kernels.attention.rotary_store_kv import rotary_store_kv_reference  # noqa: E402
from slipstream.kernels.attention.store_kv import store_kv  # noqa: E402
from slipstream.kernels.attention.triton import attention_plan  # noqa: E402
from slipstream.kernels.quant.e4m3 import E4M3, pack_latent, quantise  # noqa: E402
from slipstream.runner.graphs.manager import relative_error  # noqa: E402

from .test_rotary_attention_cuda import on_gpu  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
FP8 = Fp8Cache(torch.bfloat16, 0.03, 0.5)


@pytest.mark.parametrize("scale", [1.0, 0.0371])
def test_all_bf16_values_are_stored_as_the_reference_rounds_them(scale: float) -> None:
    x = all_bf16().view(64, 16, 64)
    cache = torch.zeros(2, 4, 16, 16, 64, dtype=E4M3, device="cuda")
    slots = torch.arange(64, device="cuda")
    store_kv(x.cuda(), x.cuda(), cache, slots, Fp8Cache(torch.bfloat16, scale, 2 * scale))
    keys, values = cache.view(torch.uint8).flatten(1, 2).cpu()
    for found, factor in ((keys, scale), (values, 2 * scale)):
        expected = quantise(x, factor)
        nan = expected.float().isnan()  # the sign of a NaN is the processor's choice
        assert torch.equal(found.view(E4M3).float().isnan(), nan)
        assert torch.equal(found[~nan], expected.view(torch.uint8)[~nan])


def test_rows_of_mla_are_packed_as_by_the_reference() -> None:
    rows = (torch.randn(200, 1, 576) * torch.logspace(-6, 3, 200)[:, None, None]).bfloat16()
    cache = torch.zeros(4, 64, 1, 656, dtype=E4M3, device="cuda")
    slots = torch.arange(200, device="cuda")
    store_kv(rows.cuda(), None, cache, slots, Fp8Cache(torch.bfloat16, latent=512))
    assert torch.equal(cache.view(torch.uint8).flatten(0, 1)[:200].cpu(), pack_latent(rows, 512))


@pytest.mark.parametrize("num_parts", [0, 4])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("heads", [(32, 8), (9, 3)])
@pytest.mark.parametrize("num_reqs", [1, 5, 40, 100])
def test_the_fused_kernel_reads_what_it_stores(
    num_reqs: int, heads: tuple[int, int], query_len: int, num_parts: int
) -> None:
    """Its codes are the reference's but for a few beside a border, and replays repeat it."""
    dim = 128 if heads[0] == 32 else 64
    lens = [int(n) for n in torch.randint(query_len, 700, (num_reqs,))] + [0]
    args = case(query_len, lens, heads, dim, dim, num_parts, torch.bfloat16, 16)
    args["cos_sin_cache"] = torch.randn(1024, dim)
    args["kv_cache"] = stored(args["kv_cache"].float().nan_to_num())
    inputs = rotary_inputs(**on_gpu(args), fp8=FP8)
    *qkv, rotation, cache, rows, rule = inputs
    expected_cache = cache.clone()
    query = rotary_store_kv_reference(*qkv, rotation, expected_cache, rows.slot_mapping, FP8)
    assert attention_plan.plan_for(qkv[0], cache, rows, rule).fused
    out = rotary_attention(*inputs)
    assert out.dtype == torch.bfloat16
    assert_codes_close(cache, expected_cache)
    expected = paged_attention_reference(query.float(), cache, rows, rule)
    assert relative_error(out, expected) < 1.5e-2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [rotary_attention(*inputs) for _ in range(5)]
    for one in outputs:
        one.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(one, out) for one in outputs)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"), wide_heads=True)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_graphs_and_drafts_change_no_text(method: str, drafters: Drafters) -> None:
    """In float32 without TF32, so that no near-tie of bf16 decides."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    texts = []
    target, config = drafters.pair(method)[0], drafters.speculative(method)
    try:
        for speculative, graph in (
            (SpeculativeConfig(), {"enforce_eager": True}),
            (SpeculativeConfig(), {}),
            (config, {"enforce_eager": True}),
            (config, {}),
        ):
            options: dict[str, Any] = {"cudagraph_capture_sizes": (4, 8, 16)} | graph
            cache = {"kv_cache_dtype": "fp8", "block_size": 16, "num_gpu_blocks_override": 200}
            engine = TinyEngine(target, speculative, graph=options, cache=cache, device="cuda")
            texts.append(engine.run(prompts(5, seed=2), max_tokens=32).tokens)
            engine.close()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert texts[1:] == [texts[0]] * 3


def test_a_scale_from_the_host_is_that_of_each_captured_layer() -> None:
    """Two layers with scales of their own in one graph."""
    args = case(1, [33, 5], (8, 2), 64, 64, 0, torch.bfloat16, 16)
    args["kv_cache"] = stored(args["kv_cache"].float().nan_to_num())
    moved = on_gpu(args)
    rules = [replace(FP8, k_scale=scale, v_scale=2 * scale) for scale in (0.03, 0.3)]
    runs = [
        rotary_inputs(**dict(moved, kv_cache=moved["kv_cache"].clone()), fp8=rule) for rule in rules
    ]
    eager = [rotary_attention(*inputs) for inputs in runs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [rotary_attention(*inputs) for inputs in runs]
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
    assert not torch.equal(*captured)
