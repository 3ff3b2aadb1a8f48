"""The experts' products for Hopper GPUs, whose roles run as threads, equal the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.experts import ACTIVATIONS, ExpertWeights
from slipstream.kernels.linear.moe import run_experts_reference

from ...cases import some
from ..gluon_threads import Machine, ThreadedKernel

pytestmark = pytest.mark.usefixtures("triton_interpreter")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernel, which runs on the CPU."""
    from slipstream.kernels.linear.grouped.triton import hopper_experts

    ThreadedKernel(hopper_experts, "_hopper_experts_kernel").replace(monkeypatch)
    return hopper_experts


def compute(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, programs: int, form: Any, *args: Any
) -> Tensor:
    """The sum of the parts, by the kernel."""
    from slipstream.kernels.linear.triton import moe

    run = partial(kernel.multiply_experts, form=form, programs=programs)
    monkeypatch.setattr(moe, "_specialised", lambda *_: run)
    return moe.expert_parts(*args, form=form).float().sum(0)


SIZES = [
    (3, 16, 2, 64, 3, 3),  # fewer pairs than experts: one expert may be a candidate twice
    (20, 6, 2, 128, 2, 2),
    (40, 3, 2, 64, 4, 5),  # several tiles of rows
    (9, 40, 6, 128, 9, 1),
]


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "block_k", "stages", "programs", "activation"),
    some(
        [(*sizes, activation) for sizes in SIZES for activation in ("silu", "clamped_swiglu")],
        kept=[(*sizes, ("silu", "clamped_swiglu")[at % 2]) for at, sizes in enumerate(SIZES)],
    ),
)
def test_it_equals_the_reference(
    rows: int, num_experts: int, top_k: int, block_k: int, stages: int, programs: int,
    activation: str, kernel: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tiles of 64 and 128 outputs are not whole, and some experts have no rows."""
    torch.manual_seed(rows)
    hidden, inner = 256, 128 if block_k == 128 else 192
    experts = ExpertWeights(
        (torch.randn(num_experts, 2 * inner, hidden) / 16).half(),
        (torch.randn(num_experts, hidden, inner) / inner**0.5).half(),
        activation=activation,
    )
    x, weights = torch.randn(rows, hidden).half(), torch.rand(rows, top_k)
    ids = torch.stack([torch.randperm(num_experts - 1)[:top_k] for _ in range(rows)]).int()
    if rows == 40:
        from slipstream.kernels.linear.triton import expert_rows

        monkeypatch.setattr(expert_rows, "rows_of_tile", lambda *_: 16)
    form = kernel.Form(block_k, stages)
    got = compute(kernel, monkeypatch, programs, form, x, experts, weights, ids)
    expected = run_experts_reference(x, experts, weights, ids.long())
    torch.testing.assert_close(got, expected.float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sizes_that_no_tile_divides(
    activation: str, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    experts = ExpertWeights(
        (torch.randn(4, 2 * 64, 192) / 14).half(), (torch.randn(4, 192, 64) / 8).half(),
        activation=activation, limit=0.6,
    )  # fmt: skip
    x, weights = torch.randn(5, 192).half(), torch.rand(5, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(5)])
    form = kernel.Form(64, 3)
    got = compute(kernel, monkeypatch, 2, form, x, experts, weights, ids)
    expected = run_experts_reference(x, experts, weights, ids)
    torch.testing.assert_close(got, expected.float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("rows", [2, 9])
def test_programs_prefetch_their_first_units(
    rows: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer pairs than experts none does, as nobody knows the experts of candidates yet."""
    experts = ExpertWeights(
        (torch.randn(6, 2 * 128, 192) / 14).half(), (torch.randn(6, 192, 128) / 11).half()
    )
    x, weights = torch.randn(rows, 192).half(), torch.rand(rows, 2)
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(rows)])
    monkeypatch.setattr(kernel, "pdl_options", lambda _: {"PDL": True})
    monkeypatch.setattr(Machine, "fetched", [])
    form = kernel.Form(64, 3, fetch=100)
    got = compute(kernel, monkeypatch, 5, form, x, experts, weights, ids)
    expected = run_experts_reference(x, experts, weights, ids)
    torch.testing.assert_close(got, expected.float(), rtol=4e-3, atol=4e-3)
    starts = {(expert * 256 + row) * 192 for expert in range(2) for row in range(256)}
    starts |= {(2 * 256 + half * 128 + row) * 192 for half in range(2) for row in range(64)}
    wanted = {(start, 96) for start in starts} if rows == 9 else set()
    assert set(Machine.fetched) == wanted


def test_it_refuses_what_it_cannot_multiply(kernel: Any) -> None:
    from slipstream.kernels.linear.triton.expert_rows import work_for

    ids, weights = torch.stack([torch.randperm(8)[:2] for _ in range(9)]), torch.rand(9, 2)
    work = work_for(weights, ids.int(), 8, 128)
    one = work_for(weights[:1], ids[:1].int(), 8, 128, one_row=True)

    def fits(x: Tensor, columns: int, inner: int, own: Any = work, **biases: Tensor) -> bool:
        gate_up, down = x.new_zeros(8, 2 * inner, columns), x.new_zeros(8, columns, inner)
        experts = ExpertWeights(gate_up, down, **biases)
        return bool(kernel.fits(x, experts, own, kernel.Form(64)))

    x = torch.zeros(9, 128).half()
    assert fits(x, 128, 64)
    assert not fits(x.float(), 128, 64)
    assert not fits(x, 128, 96) and not fits(x, 96, 64)
    assert not fits(x, 128, 64, down_bias=x.new_zeros(8, 128))
    assert not fits(x, 128, 64, one)
