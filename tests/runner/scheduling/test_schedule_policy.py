"""Decisions of the scheduler that need no state: how large one step may be."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs.schema import StepLimits
from slipstream.runner.engine import engine
from slipstream.runner.scheduling.kv_blocks import BlockGroup
from slipstream.runner.scheduling.plan import ScheduledRow
from slipstream.runner.scheduling.policy import (
    CPU_STEP_TOKENS,
    RequestQueue,
    RowLimits,
    batch_order,
    next_row,
    sort_rows,
    spread,
    step_tokens,
)
from slipstream.runner.scheduling.request import Request

from ..schedule_bench import Bench, add

KINDS = st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans())


@given(st.lists(KINDS, min_size=1, max_size=6), st.booleans())
def test_rows_are_sorted_into_batch_order_and_equal_rows_keep_theirs(
    kinds: list[tuple[int, int, bool]], alike: bool
) -> None:
    request = Request.from_message(add("a", [1]), 0, 9)
    entries = [
        (request, index, ScheduledRow(index, drafts + 1 if drafts else tokens, drafts, 0, chunk, 0))
        for index, (tokens, drafts, chunk) in enumerate(kinds[:1] * 5 if alike else kinds)
    ]
    expected = sorted(entries, key=lambda entry: (*batch_order(entry[2], 4), entry[1]))
    rows = sort_rows(entries, 4)
    assert entries == expected and rows == [row for _, _, row in expected]


@pytest.mark.parametrize(
    ("limits", "chunked", "is_cpu", "expected"),
    [
        (StepLimits(8, 2048), True, True, CPU_STEP_TOKENS),
        (StepLimits(8, 2048), True, False, 2048),
        (StepLimits(100, 2048), True, True, 500),  # all may decode with 4 drafts
        (StepLimits(8, 64), True, True, 64),
        (StepLimits(8, 2048), False, True, 2048),
    ],
)
def test_step_budget(limits: StepLimits, chunked: bool, is_cpu: bool, expected: int) -> None:
    assert step_tokens(limits, chunked, is_cpu, num_drafts=4) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [120]),
        ({"configured": False}, [16] * 7 + [8]),
        ({"configured": False, "chunked": False}, [120]),
    ],
)
def test_prompts_are_spread_over_steps_in_which_requests_decode(
    options: dict[str, bool], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, unless the user set the tokens of a step; without decodes, a step takes all."""
    monkeypatch.setattr(engine, "BESIDE_DECODES", 16)
    bench = Bench(
        (BlockGroup(200, 8),), 128, max_num_seqs=16, device="cuda", caching=False,
        max_num_batched_tokens=160, **options,
    )  # fmt: skip
    bench.engine.handle([add(f"first {i}", [1] * 40, max_tokens=30) for i in range(4)])
    bench.step()
    bench.engine.handle([add(f"late {i}", [2] * 40, max_tokens=30) for i in range(3)])
    bench.run()
    first, *steps = [[row.num_tokens for row in plan.rows] for plan in bench.runner.plans]
    assert first == [40] * 4
    prompts = [sum(tokens for tokens in step if tokens > 1) for step in steps]
    assert [tokens for tokens in prompts if tokens] == expected
    assert all(step.count(1) >= 4 for step in steps[: len(expected)])


def decoding(request_id: str, max_tokens: int = 8, **options: Any) -> Request:
    """A request whose prompt is computed."""
    request = Request.from_message(add(request_id, [1, 2], max_tokens, **options), 0, 64)
    request.enter(0, num_cached=2)
    return request


def test_beside_prompts_each_request_that_decodes_has_room_for_its_drafts() -> None:
    running = RequestQueue()
    assert spread(99, 16, running, 4) == 99  # nothing decodes
    prefilling = Request.from_message(add("new", [1, 2]), 0, 64)
    prefilling.enter(1, num_cached=0)
    for request in (decoding("a"), decoding("b"), prefilling):
        running.add(request)
    assert spread(99, 16, running, 4) == 16 + 2 * 4
    assert spread(20, 16, running, 4) == 20 and spread(99, None, running, 4) == 99


@pytest.mark.parametrize(("max_tokens", "expected"), [(5, 3), (4, 3), (3, 2), (1, 0)])
def test_a_row_has_no_draft_that_its_request_cannot_use(max_tokens: int, expected: int) -> None:
    """The row's own token is the last one of a step. A uniform batch takes all drafts."""
    for uniform, num_drafts in ((False, expected), (True, 3)):
        row = next_row(decoding("a", max_tokens), RowLimits(64, 3, uniform), available=9)
        assert row is not None and row.num_draft_tokens == num_drafts


def test_a_step_of_requests_with_different_caps_ignores_them_to_be_uniform() -> None:
    full, capped = decoding("full"), decoding("capped", speculative_max_tokens=1)
    limits = RowLimits(64, 3, uniform_drafts=True)
    for running, expected in (([capped], 1), ([full, capped], 3)):
        row = next_row(capped, limits.of_step(running), available=9)
        assert row is not None and row.num_draft_tokens == expected


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"configured": False}, True),
        ({}, False),
        ({"configured": False, "max_itl_ms": 50.0}, False),
    ],
)
def test_the_log_says_that_prompts_are_spread_only_where_they_are(
    options: dict[str, Any],
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine, "BESIDE_DECODES", 16)
    caplog.set_level(logging.INFO, engine.__name__)
    Bench(device="cuda", **options)
    assert ("prompts take at most 16 tokens" in caplog.text) == is_said


def test_a_long_prompt_leaves_gaps_for_aborts_on_a_cpu() -> None:
    bench = Bench(groups=(BlockGroup(400, 8),), max_model_len=2048, max_num_batched_tokens=2048)
    bench.engine.handle([add("long", [1 + i % 20 for i in range(1500)], max_tokens=1)])
    bench.step()
    (row,) = bench.runner.plans[0].rows
    assert row.num_tokens == CPU_STEP_TOKENS
    bench.run()
    assert bench.received["long"].finish_reason == "length"
