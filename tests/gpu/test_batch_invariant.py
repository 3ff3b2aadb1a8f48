"""`--batch-invariant` on a GPU: the bits of a row depend on nothing but the row.

Kernels are compared with themselves in other companies, and whole engines by the same fuzz as on
the CPU, with CUDA graphs, drafts, chunks, preemption and cached prefixes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.speculators.all_drafters import Drafters  # noqa: E402
from tests.speculators.invariance import MODELS, check, save_model  # noqa: E402

from slipstream.kernels.attention.paged_attention import (  # noqa: E402
    paged_attention,
    paged_attention_reference,
)
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows  # noqa: E402
from slipstream.kernels.linear.experts import ExpertWeights  # noqa: E402
from slipstream.kernels.linear.fixed import check_tiles, tiles_for  # noqa: E402
from slipstream.kernels.linear.linear import gated_linear, linear  # noqa: E402
from slipstream.kernels.linear.linear_choice import Shape  # noqa: E402
from slipstream.kernels.linear.moe import run_experts  # noqa: E402
from slipstream.kernels.linear.norm_rope import rms_norm  # noqa: E402
from slipstream.kernels.sampling.log_probs import log_probs, log_probs_reference  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA, BF16, I32 = torch.device("cuda", 0), torch.bfloat16, torch.int32
ROWS = (1, 2, 5, 16, 17, 33, 64, 100, 128, 129, 200, 256, 300, 700)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(BF16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_tiles_round_alike(dtype: torch.dtype) -> None:
    assert check_tiles(CUDA, dtype) is None


@pytest.mark.parametrize(
    ("role", "outputs", "inputs"),
    [
        *[("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096)],
        *[("down", 4096, 14336), ("head", 32000, 4096), ("qkv", 960, 576), ("other", 100, 72)],
    ],
)
def test_linear_rows(role: str, outputs: int, inputs: int) -> None:
    x, weight, shape = random(700, inputs), random(outputs, inputs, seed=1), None
    shape = Shape(role, outputs, inputs)

    def compute(rows: Tensor) -> Tensor:
        choice = tiles_for(shape, len(rows))
        if role == "gate_up":
            return gated_linear(rows, weight, None, "silu", choice)
        return linear(rows, weight, None, choice)

    whole = compute(x)
    if role != "gate_up":
        expected = x.float() @ weight.float().T
        error = (whole.float() - expected).norm() / expected.norm()
        assert error < 0.004
    for count in ROWS:
        for first in (0, 700 - count):
            part = compute(x[first : first + count].clone())
            assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first}"


def test_expert_rows() -> None:
    experts = ExpertWeights(random(16, 2 * 384, 512, seed=1), random(16, 512, 384, seed=2))
    x = random(700, 512)
    generator = torch.Generator(CUDA).manual_seed(5)
    scores = torch.rand(700, 16, generator=generator, device=CUDA)
    weights, ids = scores.topk(4)
    whole = run_experts(x, experts, weights, ids, fixed=True)
    expected = run_experts(x, experts, weights, ids)
    assert (whole.float() - expected.float()).norm() / expected.float().norm() < 0.01
    for count in ROWS:
        own = slice(700 - count, 700)
        part = run_experts(x[own].clone(), experts, weights[own], ids[own], fixed=True)
        assert torch.equal(part, whole[own]), f"{count} rows"


@pytest.mark.parametrize("size", [16, 128, 576, 1024, 4096])
def test_norm_rows(size: int) -> None:
    x, weight = random(700, size), random(size, seed=1)
    whole = rms_norm(x, weight, 1e-5)
    for count in ROWS:
        assert torch.equal(rms_norm(x[-count:].clone(), weight, 1e-5), whole[-count:])


@pytest.mark.parametrize("size", [301, 32000, 128256])
def test_log_probs_of_rows(size: int) -> None:
    x = random(40, size)
    whole = log_probs(x)
    torch.testing.assert_close(whole, log_probs_reference(x), rtol=1e-5, atol=1e-4)
    for row in range(0, 40, 7):
        assert torch.equal(log_probs(x[row : row + 1].clone())[0], whole[row])


ATTENTION: dict[str, tuple[tuple[int, int], int, dict[str, Any]]] = {
    "llama": ((32, 8), 128, {}),
    "smollm": ((9, 3), 64, {}),
    "window": ((8, 4), 256, {"sliding_window": 300, "softcap": 30.0}),
    "wide": ((8, 2), 512, {}),
    "sinks": ((64, 8), 64, {"sinks": True, "sliding_window": 128}),
    "mla": ((16, 1), 576, {"is_mla": True, "head_dim_v": 512}),
    "mla 128": ((128, 1), 576, {"is_mla": True, "head_dim_v": 512}),
}


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("max_len", [1024, 8192])
def test_attention_rows(case: str, max_len: int) -> None:
    (heads, kv_heads), dim, options = ATTENTION[case]
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = random(heads)
    mla, page, length = bool(options.get("is_mla")), 16, 900
    rule = AttentionRule(scale=dim**-0.5, **options)
    blocks = max_len // page
    shape = (3 * blocks, page, kv_heads, dim)
    cache = random(*(shape if mla else (2, *shape)))
    order = torch.randperm(3 * blocks).to(CUDA, I32).view(3, blocks)
    query = random(length, heads, dim, seed=1)
    others = random(40, heads, dim, seed=2)

    def attend(rows: Tensor, counts: list[int], lens: list[int], table: Tensor) -> Tensor:
        starts = torch.tensor([0, *counts], device=CUDA).cumsum(0).to(I32)
        seq_lens = torch.tensor(lens, dtype=I32, device=CUDA)
        slots = torch.empty(0, dtype=torch.int64, device=CUDA)
        return paged_attention(
            rows, cache, PagedRows(table, starts, seq_lens, max(counts), slots, fixed=True), rule
        )

    whole = attend(query, [length], [length], order[:1])
    plain = PagedRows(
        order[:1],
        torch.tensor([0, length], dtype=I32, device=CUDA),
        torch.tensor([length], dtype=I32, device=CUDA),
        length,
        torch.empty(0, dtype=torch.int64, device=CUDA),
    )
    expected = paged_attention_reference(query, cache, plain, rule)
    error = (whole.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01
    for at, count in (
        (0, 1),
        (1, 4),
        (100, 1),
        (255, 3),
        (300, 60),
        (511, 6),
        (700, 200),
        (899, 1),
    ):
        own = query[at : at + count]
        alone = attend(own, [count], [at + count], order[:1])
        assert torch.equal(alone, whole[at : at + count]), f"alone, {count} rows from {at}"
        rows = torch.cat((others[:33], own, others[33:]))
        company = attend(rows, [33, count, 7], [950, at + count, 400], order[[1, 0, 2]])
        assert torch.equal(company[33 : 33 + count], whole[at : at + count]), f"{count} from {at}"
        many = attend(
            torch.cat((others.repeat(5, 1, 1), own)),
            [*[1] * 200, count],
            [*range(1, 201), at + count],
            order[[*[1] * 200, 0]],
        )
        assert torch.equal(many[200:], whole[at : at + count]), f"beside 200, {count} from {at}"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("graphs", ["graphs", "eager"])
def test_any_company_gets_the_same_bits(kind: str, graphs: str, tmp_path: Path) -> None:
    graph: dict[str, Any] = {"cudagraph_capture_sizes": (4, 8, 16)}
    if graphs == "eager":
        graph = {"enforce_eager": True}
    folder = save_model(kind, tmp_path / kind)
    check(folder, rounds=6, seed=2, graph=graph, dtype="bfloat16", device="cuda")


@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
def test_a_cache_of_bytes_changes_nothing_of_it(kind: str, tmp_path: Path) -> None:
    graph, cache = {"cudagraph_capture_sizes": (4, 8, 16)}, {"kv_cache_dtype": "fp8"}
    folder = save_model(kind, tmp_path / kind)
    check(folder, rounds=2, seed=4, graph=graph, cache=cache, dtype="bfloat16", device="cuda")


def test_drafts_of_a_head_change_no_bit(tmp_path: Path) -> None:
    drafters = Drafters(tmp_path, wide_heads=True)
    target = drafters.pair("eagle3")[0]
    heads = [drafters.speculative("eagle3", k, watchdog=False) for k in (1, 3, 4)]
    graph = {"cudagraph_capture_sizes": (4, 8, 16)}
    check(
        target, rounds=4, seed=5, drafters=heads, vocab=61, graph=graph, dtype="bfloat16",
        device="cuda",
    )  # fmt: skip
