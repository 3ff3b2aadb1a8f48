"""Kernels prefetch the experts' weights that they say, and nothing beyond them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import experts as of_experts
from slipstream.kernels.linear import moe
from slipstream.kernels.linear.experts import Ahead, ExpertWeights, Routing, ahead_of

pytestmark = pytest.mark.usefixtures("triton_interpreter")
Fetched = Callable[[ModuleType], list[tuple[int, int]]]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """Let the kernels of a module prefetch; returns the spans of bytes, (address, size)."""

    def note(module: ModuleType) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []

        def fetch_bytes(pointers: Any, sizes: Any) -> None:
            at, size = pointers.handle.data.flatten(), sizes.handle.data.flatten()
            spans.extend((int(a), int(s)) for a, s in zip(at, size, strict=True))

        monkeypatch.setattr(module, "fetch_bytes", fetch_bytes)
        monkeypatch.setattr(module, "wait_for_inputs", lambda PDL: None)
        monkeypatch.setattr(module, "pdl_options", lambda tensor: {"PDL": True})
        return spans

    return note


def bytes_of(spans: list[tuple[int, int]], weights: Tensor) -> Tensor:
    """Which bytes of the weights [E, N, K] the spans cover: [E, N, bytes of a row]."""
    covered = torch.zeros(weights.numel() * weights.element_size(), dtype=torch.bool)
    for address, size in spans:
        start = address - weights.data_ptr()
        assert start % 16 == 0 and size % 16 == 0 and size > 0
        assert start >= 0 and start + size <= len(covered)
        covered[start : start + size] = True
    return covered.view(len(weights), weights.shape[1], -1)


@pytest.mark.parametrize("experts", [16, 300])
def test_the_choice_of_experts_fetches_the_first_weights(
    experts: int, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.linear.triton import route

    monkeypatch.setattr(route, "_FETCHERS", 2)
    spans = fetched(route)
    logits, weights = torch.randn(5, experts), torch.zeros(experts, 8, 64)
    routing = Routing(3, renormalise=True)
    chosen = route.select_experts(logits, routing, None, None, Ahead(weights, every=9000))
    expected = moe.select_experts_reference(logits, routing)
    torch.testing.assert_close(chosen[0], expected[0])
    assert torch.equal(chosen[1].long(), expected[1])
    threads = 2 * (32 if experts <= 256 else 128)
    first = 9000 // threads // 16 * 16 * threads
    assert first > 0
    assert bytes_of(spans, weights).flatten().nonzero().flatten().tolist() == [*range(first)]


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_the_choice_of_experts_fetches_the_chosen_ones(top_k: int, fetched: Fetched) -> None:
    from slipstream.kernels.linear.triton import route

    spans = fetched(route)
    logits, weights = torch.randn(2, 12), torch.zeros(12, 8, 64)  # 2 KiB each
    routing = Routing(top_k)
    ids = route.select_experts(logits, routing, None, None, Ahead(weights, chosen=1000))[1]
    assert torch.equal(ids.long(), moe.select_experts_reference(logits, routing)[1])
    got = bytes_of(spans, weights).view(12, -1)
    for expert in range(12):
        first = 960 if expert in ids else 0  # of 1000 bytes, four multiples of 16
        assert got[expert, :first].all() and not got[expert, first:].any()


def test_weights_that_cannot_be_fetched_are_not(fetched: Fetched) -> None:
    from slipstream.kernels.linear.triton import route

    spans = fetched(route)
    odd = torch.zeros(12, 1, 3)  # experts of 12 bytes
    small = torch.zeros(12, 1, 8)  # 384 bytes for 4096 threads
    for weights, asked in ((odd, {"chosen": 100}), (small, {"every": 100}), (small, {})):
        route.select_experts(torch.randn(2, 12), Routing(2), None, None, Ahead(weights, **asked))
    assert not spans


@pytest.mark.parametrize("rows", [2, 9])
def test_the_first_programs_fetch_their_tiles(rows: int, fetched: Fetched) -> None:
    """Of the second product the tiles of experts with rows, which have been listed before."""
    from slipstream.kernels.linear.triton import moe as triton_moe

    spans = fetched(triton_moe)
    num_experts, hidden, inner = 6, 48, 40  # the last tile of 32 outputs is not whole
    experts = ExpertWeights(
        torch.randn(num_experts, 2 * inner, hidden) / 7, torch.randn(num_experts, hidden, inner) / 7
    )
    x, weights = torch.randn(rows, hidden), torch.rand(rows, 2)
    ids = torch.stack([torch.randperm(num_experts - 1)[:2] for _ in range(rows)])
    tiles = (triton_moe.Tiles(32, 32, 2, 1), triton_moe.Tiles(32, 32, 2, 1))
    early = triton_moe.Early(7, gate_up=32, down=40)
    got = triton_moe.expert_parts(x, experts, weights, ids, tiles=tiles, early=early)
    expected = moe.run_experts_reference(x, experts, weights, ids)
    torch.testing.assert_close(got.sum(0), expected, rtol=2e-5, atol=2e-5)

    of = [[experts.gate_up, []], [experts.down, []]]
    for address, size in spans:
        start = experts.gate_up.data_ptr()
        inside = start <= address < start + experts.gate_up.nbytes
        of[0 if inside else 1][1].append((address, size))
    by_pair = rows * 2 < num_experts
    # Programs are counted by tile of 32 outputs first: 7 are those of three experts and a half.
    first = bytes_of(of[0][1], experts.gate_up).view(num_experts, 2, inner, 48, 4).all(-1)
    wanted = torch.zeros_like(first)
    if not by_pair:  # otherwise the experts of candidates are not known yet
        wanted[:3, :, :, :32] = True
        wanted[3, :, :32, :32] = True
    assert torch.equal(first, wanted)
    second = bytes_of(of[1][1], experts.down).view(num_experts, hidden, inner, 4).all(-1)
    wanted = torch.zeros_like(second)
    candidates = ids.flatten().tolist() if by_pair else [*range(num_experts)]
    for place, expert in enumerate(candidates):
        if expert in ids:
            wanted[expert, : max(0, 7 - 2 * place) * 32] = True
    assert torch.equal(second, wanted)


def test_parts_of_some_rows_have_the_dtype_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.kernels.linear.triton import expert_rows
    from slipstream.kernels.linear.triton.moe import expert_parts
    from slipstream.kernels.linear.triton.norm_rope import fused_add_rms_norm

    x, weights = torch.randn(4, 64).half(), torch.rand(4, 2)
    experts = ExpertWeights(torch.randn(5, 64, 64).half() / 8, torch.randn(5, 64, 32).half() / 6)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(4)])
    expected = moe.run_experts_reference(x, experts, weights, ids)
    monkeypatch.setattr(expert_rows, "NARROW", 4)
    parts = expert_parts(x, experts, weights, ids)
    assert parts.dtype is torch.float16 and parts.shape == (2, 4, 64)
    assert expert_parts(x[:3], experts, weights[:3], ids[:3]).dtype is torch.float32
    assert expert_parts(x, experts, weights, ids, spare=1).dtype is torch.float32
    gain, residual = torch.ones(64).half(), torch.randn(4, 64).half()
    got = fused_add_rms_norm(parts, residual, gain, 1e-6)[1]
    torch.testing.assert_close(got, residual + expected, rtol=4e-3, atol=4e-3)


def test_fetches_depend_on_the_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_experts, "FETCH_EVERY", 4096)
    monkeypatch.setattr(of_experts, "FETCH_CHOSEN", 640)
    weights = torch.zeros(8, 2, 4)
    assert ahead_of(weights, 15) == Ahead(weights, chosen=42)
    assert ahead_of(weights, 16) == Ahead(weights, every=4096)
    monkeypatch.setattr(of_experts, "FETCH_CHOSEN", 0)
    assert ahead_of(weights, 15) is None
