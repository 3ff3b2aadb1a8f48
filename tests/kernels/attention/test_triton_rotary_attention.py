"""Rotary embedding, KV write and attention in one kernel, interpreted, equal the references."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import rotary_attention
from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.rotary_store_kv import rotary_store_kv_reference

from ...cases import some
from ..attention_inputs import rotary_inputs

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
PAGE = 4


def case(
    query_len: int,
    seq_lens: list[int],
    heads: tuple[int, int] = (6, 2),
    dim: int = 16,
    rot: int = 16,
    num_parts: int = 0,
    dtype: torch.dtype = torch.float32,
    page: int = PAGE,
) -> dict[str, Any]:
    """Requests that verify `query_len` tokens each; those of length 0 are padding.

    Pages are shuffled, and memory without a key is NaN.
    """
    live = [length for length in seq_lens if length]
    tokens, padded = query_len * len(live), query_len * (len(seq_lens) - len(live)) + 1
    num_blocks = sum(-(-length // page) for length in live) + 2
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(-(-length // page) for length in live) + 1).int()
    cache = torch.full((2, num_blocks, page, heads[1], dim), float("nan"))
    slots, positions = [], []
    for row, length in enumerate(live):
        for block in range(-(-length // page)):
            table[row, block] = number = free.pop()
            used = min(page, length - query_len - block * page)
            if used > 0:
                cache[:, number, :used] = torch.randn(2, used, heads[1], dim)
        at = torch.arange(length - query_len, length)
        positions.append(at)
        slots.append(table[row, at // page].long() * page + at % page)
    none = torch.full((padded,), -1)
    counts = torch.tensor([query_len if length else 0 for length in seq_lens])
    shape = (num_parts, tokens + padded) if num_parts else (tokens + padded,)
    qkv = torch.randn(*shape, heads[0] + 2 * heads[1], dim)
    qkv[..., tokens:, :, :] = float("nan")
    qkv = qkv if num_parts else qkv.to(dtype)
    query, key, value = qkv.split([heads[0], heads[1], heads[1]], dim=-2)
    return {
        "positions": torch.cat([*positions, none.abs()]),
        "query": query,
        "key": key,
        "value": value,
        "cos_sin_cache": torch.randn(80, rot),
        "kv_cache": cache.to(dtype),
        "slot_mapping": torch.cat([*slots, none]),
        "block_table": table,
        "query_start_loc": torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "scale": dim**-0.5,
        "max_query_len": query_len,
        "arrivals": torch.zeros(len(seq_lens) * heads[1], dtype=torch.int32),
    }


def poisoned(*shape: Any, **options: Any) -> Tensor:
    """In place of `torch.empty`: memory that nobody wrote is NaN."""
    size = torch.Size(shape if isinstance(shape[0], int) else shape[0])
    return torch.full(size, float("nan")).to(**options)


def expected_of(args: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Run the references one after another: (output, cache afterwards)."""
    *qkv, rotation, cache, rows, rule = rotary_inputs(**args, **options)
    cache = cache.clone()
    query = rotary_store_kv_reference(*qkv, rotation, cache, rows.slot_mapping)
    return paged_attention_reference(query, cache.nan_to_num(), rows, rule), cache


def check(
    monkeypatch: pytest.MonkeyPatch,
    args: dict[str, Any],
    changes: dict[str, Any] | None = None,
    tolerance: float = 3e-6,
    **options: Any,
) -> None:
    from slipstream.kernels.attention.triton import attention_plan, paged_attention

    assert paged_attention.plan_launch is attention_plan.plan_launch  # bound before it is patched

    expected, cache = expected_of(args, options)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    plan, plans = attention_plan.plan_launch, []

    def changed(*sizes: Any) -> Any:
        plans.append(replace(plan(*sizes), **(changes or {})))
        return plans[-1]

    monkeypatch.setattr(attention_plan, "plan_launch", changed)
    got = rotary_attention.rotary_attention(*rotary_inputs(**args, **options))
    assert [plan.fused for plan in plans] == [True]
    assert not args["arrivals"].any()
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        args["kv_cache"], cache, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize(
    ("query_len", "heads", "heads_first", "splits"),
    some(
        [
            (*rows, *how)
            for rows in ((1, (6, 2)), (5, (9, 3)), (1, (4, 4)), (4, (6, 2)))
            for how in itertools.product((False, True), (1, 4))
        ],
        kept=[(4, (6, 2), False, 4), (1, (6, 2), True, 1), (4, (6, 2), True, 4)],
    ),
)
def test_steps_with_padding(
    query_len: int,
    heads: tuple[int, int],
    heads_first: bool,
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request without cached keys, one of several pages, and padded ones."""
    args = case(query_len, [query_len, 37, 21, 0, 0], heads)
    changes = {"splits": splits, "heads_first": heads_first, "block_n": 16}
    if heads_first and splits > 1:
        changes["last_sums"] = 0  # by a second kernel
    check(monkeypatch, args, changes)


@pytest.mark.parametrize(
    ("query_len", "window", "least_keys", "last_sums", "alone"),
    some(
        [
            *[(1, None, 16, 16, 23), (4, None, 16, 0, 50), (4, 20, 40, 0, 0), (1, None, 5, 0, 0)],
            *[(1, None, 40, 16, 0), (4, None, 5, 16, 0), (4, 20, 16, 16, 0)],
        ],
        kept=[(1, None, 16, 16, 23), (4, 20, 40, 0, 0)],
    ),
)
def test_splits_without_work(
    query_len: int,
    window: int | None,
    least_keys: int,
    last_sums: int,
    alone: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only splits with at least `least_keys` keys have work: one, some or all of 8, by request.

    With up to `alone` keys, only one has.
    """
    args = case(query_len, [query_len, 12, 23, 50, 58, 0], (3, 1))
    changes = {"splits": 8, "block_n": 16, "least_keys": least_keys, "last_sums": last_sums}
    changes["alone"] = alone
    monkeypatch.setattr(torch, "empty", poisoned)
    check(monkeypatch, args, changes, sliding_window=window)


@pytest.mark.parametrize("page", some((8, 16, 24, 48), (24,)))
def test_pages_and_tiles(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile has a part of a page, a whole one, several, or parts of two."""
    args = case(3, [70, 20, 0], page=page)
    changes = {"splits": 2, "block_n": 16, "early": True}
    check(monkeypatch, args, changes, sliding_window=40)


@pytest.mark.parametrize("splits", some((1, 2), (2,)))
@pytest.mark.parametrize("window", some((1, 3, 20), (3,)))
def test_sliding_window(window: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, case(3, [33, 3, 0]), {"splits": splits}, sliding_window=window)


def test_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, case(2, [33, 5]), {"splits": 2}, softcap=2.0)


@pytest.mark.parametrize(
    ("num_parts", "has_norms", "interleaved"),
    some(
        itertools.product((0, 3), (False, True), (False, True)),
        kept=[(0, False, True), (0, True, False), (3, True, True)],
    ),
)
def test_parts_norms_and_a_part_that_rotates(
    num_parts: int, has_norms: bool, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = case(2, [9, 30, 0], (4, 2), 24, 12, num_parts)
    norms = (torch.rand(24), torch.rand(24), 1e-6) if has_norms else None
    check(monkeypatch, args, tolerance=1e-5, interleaved=interleaved, norms=norms)


def test_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton 3.6 cannot interpret bf16 products; tests/gpu tests them.
    args = case(4, [60, 4, 0], (8, 2), 64, 64, 2, torch.float16)
    check(monkeypatch, args, {"splits": 2}, 4e-3)


@pytest.mark.parametrize(
    ("splits", "last_sums", "window"),
    some(
        [*itertools.product((1, 4), (0, 16), (None, 7))],
        kept=[(1, 0, 7), (4, 16, None), (4, 0, 7)],
    ),
)
def test_sinks(
    splits: int, last_sums: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head's sink counts once, however many splits there are, also in an empty window."""
    changes = {"splits": splits, "block_n": 16, "least_keys": 5}
    changes["last_sums"] = last_sums if splits > 1 else 0
    sinks = torch.randn(6) * 3
    check(monkeypatch, case(2, [33, 2, 0]), changes, sinks=sinks, sliding_window=window)


def test_one_kernel_sums_the_splits_if_the_next_launch_begins_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.kernels.attention.triton import rotary_attention as fused

    monkeypatch.setattr(fused, "sum_splits", None)  # the second kernel
    changes = {"splits": 4, "block_n": 16, "last_sums": 0}
    check(monkeypatch, case(1, [37, 5]), changes, whole=True)


def test_two_kernels_run_what_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.kernels.attention.triton import rotary_attention as fused

    monkeypatch.setattr(fused, "rotary_attention", None)
    args = case(1, [9, 30], (2, 2), dtype=torch.float16)
    args["query"], args["key"] = args["query"].float(), args["key"].float()
    expected, _ = expected_of(args, {})
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    got = rotary_attention.rotary_attention(*rotary_inputs(**args))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_only_short_queries_of_one_program_are_fused() -> None:
    from slipstream.kernels.attention.triton.attention_plan import plan_launch

    assert plan_launch(1, 1, 8, 4, 128, 1, 4096, 132).fused
    assert plan_launch(8, 64, 8, 4, 128, 8, 4096, 132).fused
    assert not plan_launch(4, 400, 8, 4, 128, 100, 4096, 132).fused  # prefill
    assert plan_launch(128, 512, 8, 4, 128, 4, 4096, 132).fused
    assert plan_launch(1024, 1024, 8, 4, 128, 1, 4096, 132).fused
    assert plan_launch(256, 256, 3, 3, 64, 1, 4096, 132).fused
    one, eight = (plan_launch(n, n, 8, 4, 128, 1, 4096, 132) for n in (1, 8))
    assert (one.splits, one.last_sums, eight.splits, eight.last_sums) == (16, 0, 4, 4)
    assert (one.least_keys, eight.least_keys) == (1, 128)  # splits of a short context cost more
    verify = plan_launch(8, 32, 8, 4, 128, 4, 4096, 132)
    assert (verify.splits, verify.last_sums, verify.least_keys) == (4, 16, 128)
    small = plan_launch(1, 1, 3, 3, 64, 1, 4096, 132)
    assert (small.splits, small.last_sums, small.least_keys, small.alone) == (16, 4, 128, 256)
    tiles = [plan_launch(n, n, 8, 4, 128, 1, 4096, 132) for n in (1, 2, 16, 32, 64, 128, 256)]
    assert [(plan.block_n, plan.num_stages, plan.num_warps, plan.splits) for plan in tiles] == [
        *((64, 2, 4, 16), (128, 2, 4, 16), (128, 2, 4, 2), (64, 2, 4, 4)),
        *((64, 2, 4, 4), (64, 2, 4, 2), (64, 2, 4, 2)),
    ]
    assert [plan.registers for plan in tiles] == [None, None, None, 128, 128, 128, 128]
    assert [(plan.alone, plan.least_keys) for plan in tiles[3:]] == [(512, 256)] * 4
    # Three drafts more are 16 rows, whose sums cost more than a long context alone.
    assert [plan_launch(n, 4 * n, 8, 4, 128, 4, 4096, 132).splits for n in (64, 256)] == [4, 1]


@pytest.mark.parametrize(
    ("kv_heads", "dim"),
    some(
        [(heads, dim) for heads in (1, 2, 3, 4, 5, 6, 7, 8, 12) for dim in (64, 128)],
        kept=[(1, 128), (2, 64), (3, 64), (5, 128), (8, 64), (8, 128), (12, 128)],
    ),
)
def test_powers_of_two_cover_every_kernel_variant(kv_heads: int, dim: int) -> None:
    """The dry start relies on it: it plans powers of two of requests to compile all variants."""
    from slipstream.kernels.attention.triton.attention_plan import Launch, plan_launch

    def kind(reqs: int) -> Launch:
        plan = plan_launch(reqs, reqs, kv_heads, 4, dim, 1, 4096, 132)
        return replace(plan, splits=0, least_keys=0, alone=0, only_long=False)

    met = {kind(2**n) for n in range(11)}
    assert {kind(reqs) for reqs in range(1, 1025)} == met


def test_only_long_contexts_are_split_if_programs_fill_the_gpu() -> None:
    from slipstream.kernels.attention.triton.attention_plan import plan_launch

    assert plan_launch(32, 32, 8, 4, 128, 1, 512, 132).splits == 1  # none is long
    assert plan_launch(32, 32, 8, 4, 64, 1, 16384, 132).splits == 1  # not measured
    assert not plan_launch(1, 1, 1, 128, 128, 1, 4096, 132, 4).fused  # the heads need two programs
