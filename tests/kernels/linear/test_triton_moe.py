"""Triton's routers and experts, interpreted, equal the references."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import moe
from slipstream.kernels.linear.experts import ACTIVATIONS, ExpertWeights, Routing

from ...cases import some

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about overflow
]
# rows, experts, top k: one row; fewer pairs than experts; more than one tile of rows
SIZES = [(1, 8, 2), (3, 16, 2), (40, 4, 2), (7, 3, 3)]


def random_experts(
    num_experts: int, hidden: int, inner: int, activation: str, dtype: torch.dtype
) -> ExpertWeights:
    """Experts with outputs around 1; those of "clamped_swiglu" have biases, as in gpt-oss."""
    stacks = [
        torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5,
        torch.randn(num_experts, hidden, inner) / inner**0.5,
    ]
    if activation == "clamped_swiglu":
        stacks += [torch.randn(num_experts, 2 * inner) * 4, torch.randn(num_experts, hidden)]
    limit = 0.6 if activation == "limited_silu" else 7.0  # so low that it matters
    return ExpertWeights(*(stack.to(dtype) for stack in stacks), activation=activation, limit=limit)


def random_choice(rows: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(rows)])
    return torch.rand(rows, top_k), ids.int()


@pytest.mark.parametrize(
    ("size", "activation", "dtype"),
    some(
        itertools.product(SIZES, ACTIVATIONS, (torch.float32, torch.float16)),
        kept=[
            (SIZES[0], "clamped_swiglu", torch.float32),
            (SIZES[1], "silu", torch.float16),
            (SIZES[2], "clamped_swiglu", torch.float32),
            (SIZES[3], "gelu_tanh", torch.float16),
            (SIZES[0], "limited_silu", torch.float32),
            (SIZES[3], "limited_silu", torch.float32),
        ],
    ),
)
def test_run_experts(size: tuple[int, int, int], activation: str, dtype: torch.dtype) -> None:
    from slipstream.kernels.linear.triton.moe import run_experts

    rows, num_experts, top_k = size
    x = torch.randn(rows, 72).to(dtype)
    experts = random_experts(num_experts, 72, 40, activation, dtype)
    weights, ids = random_choice(rows, num_experts, top_k)
    expected = moe.run_experts_reference(x, experts, weights, ids.long())
    got = run_experts(x, experts, weights, ids)
    tolerance = 2e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tma", [False, True])
def test_parts_of_few_rows_add_up_and_leave_room(tma: bool) -> None:
    from slipstream.kernels.linear.triton.moe import Tiles, expert_parts

    x = torch.randn(5, 64)
    experts = random_experts(6, 64, 48, "silu", torch.float32)
    weights, ids = random_choice(5, 6, 3)
    tiles = (Tiles(16, 32, 2, 4), Tiles(32, 16, 2, 4))
    parts = expert_parts(x, experts, weights, ids, 1, tiles, tma)
    assert parts.shape == (4, 5, 64) and parts.dtype is torch.float32
    expected = moe.run_experts_reference(x, experts, weights, ids.long())
    torch.testing.assert_close(parts[:3].sum(0), expected, rtol=2e-5, atol=2e-5)


def test_parts_of_many_rows_have_the_dtype_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.kernels.linear.triton import expert_rows
    from slipstream.kernels.linear.triton.moe import expert_parts
    from slipstream.kernels.linear.triton.norm_rope import fused_add_rms_norm

    x, experts = torch.randn(4, 64).half(), random_experts(5, 64, 32, "silu", torch.float16)
    weights, ids = random_choice(4, 5, 2)
    expected = moe.run_experts_reference(x, experts, weights, ids.long())
    monkeypatch.setattr(expert_rows, "NARROW", 4)
    parts = expert_parts(x, experts, weights, ids)
    assert parts.dtype is torch.float16 and parts.shape == (2, 4, 64)
    assert expert_parts(x[:3], experts, weights[:3], ids[:3]).dtype is torch.float32
    assert expert_parts(x, experts, weights, ids, spare=1).dtype is torch.float32
    residual = torch.randn(4, 64).half()
    got = fused_add_rms_norm(parts, residual, torch.ones(64).half(), 1e-6)[1]
    torch.testing.assert_close(got, residual + expected, rtol=4e-3, atol=4e-3)


def test_many_rows_of_one_expert_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in prefill: tiles of 128 rows, several programs for an expert, and parts summed."""
    from slipstream.kernels.linear.triton import expert_rows
    from slipstream.kernels.linear.triton import moe as triton_moe

    monkeypatch.setattr(expert_rows, "FEW", 4)
    monkeypatch.setattr(expert_rows, "_PAIRS", 64)
    x, weights = torch.randn(300, 32), torch.rand(300, 2)
    experts = random_experts(3, 32, 16, "silu", torch.float32)
    ids = torch.tensor([[2, 0], [2, 1]]).repeat(150, 1)
    expected = moe.run_experts_reference(x, experts, weights, ids)
    got = triton_moe.expert_parts(x, experts, weights, ids, spare=1)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_experts_of_one_row_each_and_experts_without_any() -> None:
    from slipstream.kernels.linear.triton.moe import run_experts

    x, weights = torch.randn(3, 32), torch.ones(3, 1)
    experts = random_experts(64, 32, 16, "silu", torch.float32)
    ids = torch.tensor([[63], [0], [63]])
    expected = moe.run_experts_reference(x, experts, weights, ids)
    got = run_experts(x, experts, weights, ids)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert not run_experts(x[:0], experts, weights[:0], ids[:0]).numel()


@pytest.mark.parametrize("size", [(1, 8, 2), (3, 16, 4), (40, 4, 2)])
def test_absent_experts_are_left_out(size: tuple[int, int, int]) -> None:
    """Two halves of the experts, of which each leaves out the other's, add up to all."""
    from slipstream.kernels.linear.triton.moe import run_experts

    rows, num_experts, top_k = size
    x, half = torch.randn(rows, 32), num_experts // 2
    experts = random_experts(num_experts, 32, 16, "silu", torch.float32)
    weights, ids = random_choice(rows, num_experts, top_k)
    expected = moe.run_experts_reference(x, experts, weights, ids.long())
    for run in (run_experts, run_absent):
        got = torch.zeros_like(x)
        for first in (0, half):
            own = ExpertWeights(experts.gate_up[first:][:half], experts.down[first:][:half])
            here = ids - first
            here = here.masked_fill((here < 0) | (here >= half), -1)
            got += run(x, own, weights, here, True)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def run_absent(
    x: torch.Tensor, own: ExpertWeights, weights: torch.Tensor, ids: torch.Tensor, absent: bool
) -> torch.Tensor:
    """The reference, as the public function calls it on a CPU."""
    ids = ids.long().masked_fill(ids < 0, own.down.shape[0])
    return moe.run_experts_reference(x, own, weights, ids)


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_select_experts(renormalise: bool, scoring: str, parts: int) -> None:
    from slipstream.kernels.linear.triton import route

    logits = torch.randn(*([parts] if parts else []), 9, 11) * (9 if "plus" in scoring else 1)
    bias = None if scoring == "softmax" else torch.randn(11) * 0.3
    routing = Routing(3, scoring, renormalise=renormalise, scale=2.5)
    weights, ids = route.select_experts(logits, routing, bias)
    expected, expected_ids = moe.select_experts_reference(logits, routing, bias)
    assert torch.equal(ids, expected_ids.int())
    torch.testing.assert_close(weights, expected)


def stable_choice(choice: Tensor, routing: Routing) -> Tensor:
    """The ids that the definition gives to each row of `choice` [T, E], first ones first."""
    found = []
    for row in choice.tolist():
        size = len(row) // routing.num_groups
        groups = [row[i : i + size] for i in range(0, len(row), size)]
        best = 2 if routing.group_score == "top2" else 1
        scores = [float(torch.tensor(sorted(group)[-best:]).sum()) for group in groups]
        kept = sorted(range(len(groups)), key=lambda g: -scores[g])[: routing.top_groups]
        allowed = [e for e in range(len(row)) if e // size in kept]
        found.append(sorted(allowed, key=lambda e: -row[e])[: routing.top_k])
    return torch.tensor(found, dtype=torch.int32)


GROUPED = [  # experts, groups, kept groups, experts of a token
    (256, 8, 4, 8), (12, 4, 2, 3), (15, 3, 2, 4), (160, 8, 3, 6), (8, 4, 4, 8), (6, 2, 1, 2),
]  # fmt: skip


SCORED = [*zip(GROUPED, ["top2", "max"] * 3, strict=True)]


@pytest.mark.parametrize(
    ("size", "score", "ties"),
    some(
        [(*case, ties) for case in SCORED for ties in (False, True)],
        kept=[*((*case, False) for case in SCORED), *((*case, True) for case in SCORED[:2])],
    ),
)
def test_experts_of_the_best_groups_are_chosen(
    size: tuple[int, int, int, int], score: str, ties: bool
) -> None:
    """As torch chooses them; of equal experts and of equal groups the first."""
    from slipstream.kernels.linear.triton import route

    experts, groups, kept, top_k = size
    scoring = "sigmoid" if score == "top2" else "softmax"
    routing = Routing(top_k, scoring, groups, kept, score, scoring == "sigmoid", 2.5)
    parts = torch.randn(2, 14, experts)
    bias = torch.randn(experts) * 0.3 if scoring == "sigmoid" else None
    if ties:
        parts, bias = parts.mul(1.5).round() * 0.5, None if bias is None else bias.round()
        parts[:, 12:] = 0.0
    weights, ids = route.select_experts(parts, routing, bias)
    scores = parts.sum(0).sigmoid() if scoring == "sigmoid" else parts.sum(0).softmax(-1)
    choice = scores if bias is None else scores + bias
    assert torch.equal(ids, stable_choice(choice, routing))
    expected, by_torch = moe.select_experts_reference(parts, routing, bias)
    if not ties:
        assert torch.equal(ids, by_torch.int())
        torch.testing.assert_close(weights, expected)
    own = scores.gather(1, ids.long())
    own = own / own.sum(-1, keepdim=True) if routing.renormalise else own
    torch.testing.assert_close(weights, own * 2.5)
    for row in (0, 6, 13):  # whatever the number of rows
        alone = route.select_experts(parts[:, row : row + 1].contiguous(), routing, bias)
        assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], ids[row])


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "softmax"])
def test_a_table_chooses_the_experts_of_a_token_id(scoring: str) -> None:
    from slipstream.kernels.linear.triton import route

    table = torch.stack([torch.randperm(11)[:6] for _ in range(20)])
    tokens, logits = torch.randint(20, (9,), dtype=torch.int32), torch.randn(3, 9, 11)
    routing = Routing(6, scoring, renormalise=True, scale=1.5)
    weights, ids = route.select_experts(logits, routing, None, (tokens, table))
    expected, chosen = moe.select_experts_reference(logits, routing, None, (tokens, table))
    assert torch.equal(ids, chosen.int()) and torch.equal(chosen, table[tokens.long()])
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("routing", [Routing(4), Routing(4, "sigmoid", 3, 2, "top2")])
def test_any_scores_choose_different_experts_that_exist(routing: Routing) -> None:
    """Padded rows may hold anything; an id out of range would read foreign memory."""
    from slipstream.kernels.linear.triton import route

    logits = torch.full((4, 6), float("nan"))
    logits[1], logits[2], logits[3, 1:] = float("-inf"), 0.0, 1.0
    ids = route.select_experts(logits, routing)[1]
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist())


@pytest.mark.parametrize(("engines", "rows", "top_k"), [(2, 1, 2), (3, 60, 3), (2, 5, 8)])
def test_own_experts(engines: int, rows: int, top_k: int) -> None:
    from slipstream.kernels.linear.triton import route

    ids = random_choice(engines * rows, 12, top_k)[1]
    ids[0] = -1  # a row that another kernel has left out
    num_rows = torch.tensor([rows, *[rows // 2] * (engines - 2), 0], dtype=torch.int32)
    args = (ids, 4, 5, num_rows)
    loads, wanted = torch.arange(6), torch.arange(6)  # they go on counting
    here = route.own_experts(*args, loads)
    assert torch.equal(here, moe.own_experts_reference(*args, wanted))
    assert torch.equal(loads, wanted)
    real = [ids[engine * rows :][: int(count)] for engine, count in enumerate(num_rows)]
    pairs = torch.cat(real).flatten()
    assert torch.equal(
        loads - torch.arange(6),
        torch.tensor(
            [(pairs < 4).sum() + (pairs > 8).sum(), *((pairs == e).sum() for e in range(4, 9))]
        ),
    )
    last = here.view(engines, rows, top_k)[-1]
    assert bool((last == -1).all())  # an idle engine's dummy rows read no weights


@pytest.mark.parametrize(
    ("rows", "parts", "bias", "wide_gain"),
    [(1, None, False, True), (3, 0, True, False), (2, 3, False, False)],
)
def test_a_norm_and_the_router_behind_it(
    rows: int, parts: int | None, bias: bool, wide_gain: bool
) -> None:
    """A row that is the stream; rows to add to the stream, whole or in parts."""
    from slipstream.kernels.linear.triton.normed_scores import normed_scores

    x, residual = torch.randn(rows, 72).half(), None
    if parts is not None:
        residual = torch.randn(rows, 99).half()[:, 9:81]
        x = torch.randn(parts, rows, 72) if parts else x
    gain = torch.rand(72) + 0.5
    norm = (gain if wide_gain else gain.half(), 1e-5)
    weight = torch.randn(70, 72).half()
    offset = torch.randn(70).half() if bias else None
    got = normed_scores(x, residual, norm, weight, offset)
    expected = moe.normed_scores_reference(x, residual, norm, weight, offset)
    assert got[2].dtype is torch.float32
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_experts_of_one_row_are_added_to_the_stream(activation: str) -> None:
    from slipstream.kernels.linear.triton.moe import add_experts

    x, residual = torch.randn(2, 1, 72)
    experts = random_experts(8, 72, 40, activation, torch.float32)
    weights, ids = random_choice(1, 8, 3)
    expected = moe.add_experts_reference(x, experts, weights, ids.long(), residual)
    got = add_experts(x, experts, weights, ids, residual)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
