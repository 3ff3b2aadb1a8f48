"""What the Hopper kernel of "mxfp4" experts reads: sorted rows, words and factors in its order.

Its products are computed from the same memory step by step, and the roles of its warps run as
threads, of which only what widens words in registers is replaced.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.experts import PackedExperts
from slipstream.kernels.linear.moe import run_experts_reference
from slipstream.kernels.quant import tiled
from slipstream.kernels.quant.stack import empty_stack, fill_rows
from slipstream.kernels.quant.tiled import FP4_FIELDS, FP4_SIGNS, TiledWeight, tile
from slipstream.runner.models.formats import expert_stack
from slipstream.runner.models.formats.expert_stack import ExpertStack, choose_form
from slipstream.runner.models.formats.weight_format import WeightFormat

from ...cases import some
from ..gluon_threads import ThreadedKernel
from ..quant.random_weights import random_weight

pytestmark = pytest.mark.usefixtures("triton_interpreter")


def narrow_stack(count: int, rows: int, columns: int) -> TiledWeight:
    parts = [random_weight("mxfp4", rows, columns, seed=e + rows) for e in range(count)]
    stack = empty_stack(tile(parts[0], narrow=True), count * rows)
    for expert in reversed(range(count)):
        fill_rows(stack, expert * rows, tile(parts[expert], narrow=True))
    assert isinstance(stack, TiledWeight)
    return stack


def exponents(code: Tensor) -> Tensor:
    """Bits of bfloat16 numbers."""
    return code.to(torch.int16).view(torch.bfloat16).double()


def numbers_in_order(weight: TiledWeight, block: int, step: int) -> Tensor:
    """The numbers [64, 256] that the tensor cores get of 64 rows and 256 columns, by thread.

    The thread of lane l in warp w has rows 16 w + l // 4 and 8 more, and 16 words at l % 4 * 16.
    """
    assert weight.factors is not None
    tile_of = torch.zeros(64, 64, dtype=torch.int32)
    part = weight.words[64 * block : 64 * block + 64, 64 * step : 64 * step + 64]
    tile_of[:, : part.shape[1]] = part.int() & 0xFFFF
    factors = weight.factors[block, step].view(torch.uint8).view(128, 4).long()
    made = torch.full((64, 256), float("nan"), dtype=torch.float64)
    thread, word = torch.arange(128)[:, None], torch.arange(16)
    warp, lane = thread // 32, thread % 32
    v, h, b = word // 4, word // 2 % 2, word % 2  # 4 to an instruction, in pairs 8 apart
    for half in (0, 1):
        row = 16 * warp + lane // 4 + 8 * half
        words = tile_of[row, lane % 4 * 16 + word]
        for index in range(4):
            code = (words >> FP4_FIELDS[index] & 7) << 6
            code |= (words >> FP4_SIGNS[index] & 1) << 15
            factor = exponents(factors[:, 2 * half + index // 2, None] << 7)
            made[row, 64 * index + 16 * v + 8 * h + 2 * (lane % 4) + b] = exponents(code) * factor
    return made


@pytest.mark.parametrize("columns", [320, 96])
def test_products_from_the_kernels_memory_are_those_of_the_weights(columns: int) -> None:
    from slipstream.kernels.packed.grouped.triton.sort_rows import arrange

    weight = narrow_stack(3, 128, columns)
    x = torch.randn(5, columns).bfloat16()
    ids = torch.tensor([[2, 0], [-1, 2], [2, 1], [0, -1], [0, 2]], dtype=torch.int32)
    plan, pairs, rows = arrange(x, torch.ones(5, 2), ids, 3, 2)
    assert plan.tolist() == [[0, 3, 4], [3, 1, 4], [2, 3, 5]]
    assert pairs[:8].tolist() == [1, 6, 8, 5, 0, 3, 4, 9]
    assert rows.shape == (10, -(-columns // 256) * 256)
    exact = weight.dequantise().double().view(3, 128, columns)
    for expert in range(3):
        start, count = plan[0, expert], plan[1, expert]
        own = pairs[start : start + count].long() // 2
        expected = exact[expert] @ x[own].double().T
        sums = torch.zeros(128, len(own), dtype=torch.float64)
        for half in (0, 1):
            for step in range(rows.shape[1] // 256):
                made = numbers_in_order(weight, 2 * expert + half, step)
                some = rows[start : start + count, 256 * step : 256 * step + 256]
                sums[64 * half : 64 * half + 64] += made @ some.double().T
        assert torch.allclose(sums * tiled.FACTOR_DIVISOR, expected, rtol=1e-12, atol=1e-12)


def numbers(words: Tensor, scales: Tensor) -> list[Tensor]:
    """In place of the assembly: the numbers [64, 64] of each slice of words [64, 64], with the
    factors [1, 128] of threads."""
    wide, factors = words.int() & 0xFFFF, scales.contiguous().view(torch.uint8)
    by_row = factors.view(4, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(64, 4, 2)
    made = []
    for index in range(4):
        code = (wide >> FP4_FIELDS[index] & 7) << 6 | (wide >> FP4_SIGNS[index] & 1) << 15
        factor = exponents(by_row[:, :, index // 2].long() << 7).repeat_interleave(16, 1)
        made.append((exponents(code) * factor).float())
    return made


CASES = [  # rows, experts, hidden, inner size, form, whether some are absent
    (5, 3, 320, 128, (16, 3, 3, 2), False),
    (40, 3, 192, 192, (32, 3, 2, 2), True),
    (70, 2, 256, 320, (64, 2, 3, 1), False),
    (24, 2, 128, 64, (64, 3, 4, 2), False),
    (270, 2, 64, 64, (64, 2, 3, 2), False),
]


@pytest.mark.parametrize(
    ("rows", "count", "hidden", "inner", "form", "absent"),
    some(CASES, kept=[case for case in CASES if case[0] != 24]),
)
def test_the_roles_of_warps_compute_the_experts(
    rows: int,
    count: int,
    hidden: int,
    inner: int,
    form: tuple[int, int, int, int],
    absent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.kernels.packed.grouped.triton import hopper_experts, sort_rows

    ThreadedKernel(hopper_experts, "_hopper_experts_kernel", _numbers=numbers).replace(monkeypatch)
    torch.manual_seed(rows)
    biases = (torch.randn(count, 2 * inner), torch.randn(count, hidden)) if count == 3 else ()
    experts = PackedExperts(
        *(narrow_stack(count, 2 * inner, hidden), narrow_stack(count, hidden, inner), count),
        *(biases or (None, None)),
        "clamped_swiglu" if biases else "silu",
    )
    x = torch.randn(rows, hidden)
    weights = torch.rand(rows, 2)
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(rows)])
    if absent:
        ids = ids.masked_fill(torch.rand(rows, 2) < 0.4, -1)
    expected = run_experts_reference(x, experts.widened(torch.float32), weights, ids)
    chosen = hopper_experts.Form(*form)
    if rows > 50:
        monkeypatch.setattr(sort_rows, "_SORTED_AT_ONCE", 1)
    got = hopper_experts.expert_parts(
        x, experts, weights, ids.int(), spare=1, absent=absent, forms=(chosen, chosen)
    )
    assert got.shape == ((3, rows, hidden) if rows <= 256 else (rows, hidden))
    total = got[:2].sum(0) if rows <= 256 else got
    assert float((total - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(("experts", "at_once"), [(3, True), (40, True), (40, False)])
def test_rows_are_sorted_by_expert(
    experts: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.packed.grouped.triton import sort_rows

    monkeypatch.setattr(sort_rows, "_SORTED_AT_ONCE", 1024 if at_once else 1)

    torch.manual_seed(experts)
    x = torch.randn(37, 64).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(37)])
    plan, pairs, rows = sort_rows.arrange(x, torch.ones(37, 3), ids, experts, 16)
    flat = ids.flatten()
    assert torch.equal(pairs.long(), flat.argsort(stable=True))
    counts = torch.bincount(flat, minlength=experts)
    assert torch.equal(plan[1].long(), counts)
    assert torch.equal(plan[0].long(), counts.cumsum(0) - counts)
    assert torch.equal(plan[2].long(), ((counts + 15) // 16).cumsum(0))
    column = torch.arange(64)
    place = column // 16 * 64 + column % 16 // 4 * 16 + column % 4 // 2 * 8 + column % 2
    assert torch.equal(rows[:, place], x[pairs.long() // 3])
    rest = torch.ones(256, dtype=torch.bool)
    rest[place] = False
    assert not rows[:, rest].any()


@pytest.mark.parametrize(
    ("rows", "tma"),
    some([(rows, tma) for rows in (1, 6) for tma in (True, False)], [(1, False), (6, True)]),
)
def test_narrow_spans_give_the_same_experts(rows: int, tma: bool) -> None:
    from slipstream.kernels.packed.triton.packed_experts import expert_parts

    count, hidden, inner = 3, 320, 64
    experts = PackedExperts(
        narrow_stack(count, 2 * inner, hidden), narrow_stack(count, hidden, inner), count
    )
    x = torch.randn(rows, hidden).half()
    weights, ids = torch.rand(rows, 2), torch.tensor([[0, 2], [2, 1]] * 3)[:rows]
    wide = experts.widened(torch.float32)
    expected = run_experts_reference(x.float(), wide, weights, ids)
    got = expert_parts(x, experts, weights, ids.int(), tma=tma)
    assert float((got.sum(0) - expected).norm() / expected.norm()) < 6e-3


@pytest.mark.parametrize(
    ("count", "inner", "activation", "expected"),
    [
        (128, 192, "silu", True),
        (129, 192, "silu", False),
        (2, 96, "clamped_swiglu", False),  # as half of gpt-oss's 2880 features
        (2, 192, "limited_silu", False),
    ],
)
def test_experts_of_other_forms_get_no_factors(
    count: int, inner: int, activation: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_stack, "NARROW", True)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")  # codes become words
    fmt = WeightFormat(torch.device("cpu"), torch.bfloat16, packed=True)
    gate_up, down = (ExpertStack(count, *size, fmt) for size in ((2 * inner, 64), (64, inner)))
    choose_form(gate_up, down, activation)
    for stack in (gate_up, down):
        stack.take(0, 0, random_weight("mxfp4", stack.rows, stack.columns, seed=1))
        assert stack.packed is not None and isinstance(stack.packed.weight, TiledWeight)
        assert (stack.packed.weight.factors is not None) == expected


def test_only_usual_scales_become_factors() -> None:
    weight = random_weight("mxfp4", 64, 96, seed=1)
    weight.scales[0, 0] = tiled.MOST_EXPONENT
    assert tiled.can_be_narrow(weight)
    made = tile(weight, narrow=True)
    assert made.words.shape == (64, 32) and made.factors is not None
    assert torch.equal(made.dequantise(), weight.dequantise())
    few = made.rows(torch.tensor([5, 1]))
    assert torch.equal(few, weight.dequantise()[[5, 1]])
    weight.scales[0, 0] += 1
    assert not tiled.can_be_narrow(weight)
    assert not tiled.can_be_narrow(random_weight("mxfp4", 63, 96, seed=1))
    assert not tiled.can_be_narrow(random_weight("nvfp4", 64, 96, seed=1))
    assert not tiled.can_be_narrow(replace(weight, global_scale=torch.ones(64)))
