"""Attention back ends on a GPU are correct, and their graphs equal eager runs as they claim.

Covers every back end with query lengths 1, 2, 4, 6 and mixed, sequence lengths from 64 to 4096,
batches of 1 to 64 requests, and padding.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import Fp8Cache, PagedRows
from slipstream.kernels.quant.e4m3 import unpack_latent
from slipstream.runner.attention.base import AttentionLayer
from slipstream.runner.attention.choice import choose_backend
from slipstream.runner.claims.case import ClaimSetup, ClaimTrial
from slipstream.runner.claims.claims import ClaimCase
from slipstream.runner.graphs.capture import CudaGraphs, GraphPool
from slipstream.runner.graphs.manager import relative_error

from ..runner.claims.checked_claim import check_claim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PACKAGES = {"triton": "triton", "flashinfer": "flashinfer", "flash_mla": "flash_mla"}
GQA = AttentionLayer(0, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
SMALL = AttentionLayer(0, num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
WINDOW = AttentionLayer(
    0, num_heads=8, num_kv_heads=4, head_dim=256, scale=0.06, sliding_window=512, softcap=50.0
)
MLA = AttentionLayer(
    0, num_heads=16, num_kv_heads=1, head_dim=576, scale=0.07, head_dim_v=512, is_mla=True
)
MLA_LARGE = AttentionLayer(
    0, num_heads=128, num_kv_heads=1, head_dim=576, scale=0.07, head_dim_v=512, is_mla=True
)
FP8, PACKED = Fp8Cache(torch.bfloat16, 0.03, 0.02), Fp8Cache(torch.bfloat16, latent=512)
LAYERS = {
    "gqa": GQA, "small": SMALL, "window": WINDOW, "mla": MLA, "mla_large": MLA_LARGE,
    "gqa fp8": replace(GQA, fp8=FP8), "small fp8": replace(SMALL, fp8=FP8),
    "window fp8": replace(WINDOW, fp8=FP8), "mla fp8": replace(MLA, fp8=PACKED),
    "mla_large fp8": replace(MLA_LARGE, fp8=PACKED),
}  # fmt: skip
RUNS = [
    ("triton", "gqa"),
    ("triton", "small"),
    ("triton", "window"),
    ("triton", "mla"),
    ("flashinfer", "gqa"),
    ("flashinfer", "small"),
    ("flash_mla", "mla"),
    ("flash_mla", "mla_large"),
    ("triton", "gqa fp8"),
    ("triton", "small fp8"),
    ("triton", "window fp8"),
    ("triton", "mla fp8"),
    ("triton", "mla_large fp8"),
    ("flashinfer", "gqa fp8"),
    ("flashinfer", "small fp8"),
]
FP32_ERROR = 8e-3  # allowed relative error of bf16 attention against fp32 on the same bf16 inputs


@pytest.fixture(scope="module")
def pool() -> GraphPool:
    return GraphPool(CudaGraphs(torch.device("cuda", 0)))


def make_trial(backend: str, layer: str, num_reqs: int, pool: GraphPool) -> ClaimTrial:
    if importlib.util.find_spec(PACKAGES[backend]) is None:
        pytest.skip(f"the package {PACKAGES[backend]} is not installed")
    device = torch.device("cuda", 0)
    chosen = choose_backend(backend, [LAYERS[layer]], device)
    setup = ClaimSetup(
        num_reqs=num_reqs, mixed_tokens=60 + 4 * num_reqs, block_size=chosen.block_size(16)
    )
    torch.manual_seed(num_reqs)
    return ClaimTrial(chosen, LAYERS[layer], setup, torch.bfloat16, device, pool)


@pytest.mark.parametrize("num_reqs", [1, 4, 64])
@pytest.mark.parametrize(("backend", "layer"), RUNS)
def test_graph_equals_eager(backend: str, layer: str, num_reqs: int, pool: GraphPool) -> None:
    with torch.inference_mode():
        trial = make_trial(backend, layer, num_reqs, pool)
        errors: dict[str, float] = {}
        for length in (1, 2, 4, 6, None):
            case = ClaimCase(length)
            if case.needs() <= trial.builder.supports:
                errors[str(case)] = trial.measure(case)
    assert len(errors) >= 4
    assert max(errors.values()) < 1e-2, errors
    assert getattr(trial.builder, "num_eager_fallbacks", 0) == 0


@pytest.mark.parametrize("length", [1, 4, None])
@pytest.mark.parametrize(("backend", "layer"), RUNS)
def test_eager_equals_fp32_reference(
    backend: str, layer: str, length: int | None, pool: GraphPool
) -> None:
    with torch.inference_mode():
        trial = make_trial(backend, layer, 4, pool)
        query_lens = trial.query_lens(length, 4)
        lens = [max(n, q) for n, q in zip((4096, 1000, 65, 1), query_lens, strict=True)]
        num_tokens = sum(query_lens)
        desc = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, 4, length)
        common = trial.fill(desc, query_lens, lens)
        got = trial.forward(num_tokens, trial.state(trial.builder.build(common)))
        expected = reference(trial, common, num_tokens)
    assert relative_error(got, expected) < FP32_ERROR


def reference(trial: ClaimTrial, common: Any, num_tokens: int) -> Tensor:
    """Attention in fp32 on the KV cache that `trial.forward` has written."""
    layer, cache = trial.layer, trial.cache
    if layer.fp8 is None:
        cache = cache.float()
    elif layer.is_mla:  # the kernel multiplies the widened rows as bf16
        cache = unpack_latent(cache.view(torch.uint8), layer.fp8.latent, torch.bfloat16).float()
        layer = replace(layer, fp8=None)
    return paged_attention_reference(
        trial.query[:num_tokens].float(),
        cache,
        PagedRows(
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            common.max_query_len,
            common.slot_mapping,
        ),
        layer,
    )


@pytest.mark.parametrize(
    ("backend", "layer", "claim"),
    [
        ("triton", "small", AttentionCGSupport.ALWAYS),
        ("flashinfer", "small", AttentionCGSupport.UNIFORM_BATCH),
        ("flash_mla", "mla", AttentionCGSupport.UNIFORM_BATCH),
    ],
)
def test_claims_are_verified(
    backend: str, layer: str, claim: AttentionCGSupport, pool: GraphPool
) -> None:
    trial = make_trial(backend, layer, 1, pool)
    chosen = choose_backend(backend, [LAYERS[layer]], trial.device)
    with torch.inference_mode():
        verified = check_claim(
            chosen, LAYERS[layer], [1, 4], pool, trial.setup, torch.bfloat16, trial.device
        )
    assert verified is claim


def test_a_borrowed_tensor_shares_its_owners_memory() -> None:
    graphs = CudaGraphs(torch.device("cuda", 0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        owner = torch.arange(60, device="cuda").to(dtype).view(5, 12)
        view = owner[1:, 2:8]
        borrowed = graphs.borrow(view)
        assert borrowed.data_ptr() == view.data_ptr() and borrowed.stride() == view.stride()
        assert torch.equal(borrowed, view)
        owner.fill_(1)
        assert bool((borrowed == 1).all())
