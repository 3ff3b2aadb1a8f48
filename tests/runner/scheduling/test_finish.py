"""When a request ends, what it keeps, and how that is counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runner.messages import RequestOutput, StepStats, unpack_logprobs
from slipstream.runner.scheduling.finish import append_tokens, count_outputs, make_output
from slipstream.runner.scheduling.plan import RowResult
from slipstream.runner.scheduling.request import Request

from ..schedule_bench import Bench, ParityMatcher, add


def request(max_tokens: int = 10, max_model_len: int = 100, **options: object) -> Request:
    options.setdefault("stop_token_ids", [9])
    return Request.from_message(add("a", [1, 2], max_tokens, **options), 0, max_model_len)


def outcome(request: Request, result: RowResult) -> tuple[RequestOutput, StepStats]:
    stats = StepStats(accepted_per_pos=[0] * 4)
    output = make_output(request, result, append_tokens(request, result.token_ids))
    count_outputs(stats, [output])
    return output, stats


def test_a_stop_inside_an_accepted_run_cuts_tokens_logprobs_and_counters() -> None:
    logprobs = [(token, -0.5, 1, [token], [-0.5]) for token in (5, 9, 7, 8)]
    result = RowResult([5, 9, 7, 8], num_draft_tokens=4, logprobs=logprobs)
    a = request()
    output, stats = outcome(a, result)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([5, 9], "stop", 9)
    assert output.logprobs is not None and [item.token_id for item in output.logprobs] == [5, 9]
    assert a.token_ids == [1, 2, 5, 9]
    assert stats.num_generated_tokens == 2
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 4, 1)
    assert stats.accepted_per_pos == [1, 0, 0, 0]


def test_max_tokens_cuts_an_accepted_run() -> None:
    output, stats = outcome(request(max_tokens=3), RowResult([5, 6, 7, 8], num_draft_tokens=3))
    assert (output.token_ids, output.finish_reason) == ([5, 6, 7], "length")
    assert (stats.num_accepted_tokens, stats.num_generated_tokens) == (2, 3)


def test_the_context_ends_a_request_before_max_tokens_does() -> None:
    output, _ = outcome(request(max_model_len=4), RowResult([5, 6, 7], num_draft_tokens=2))
    assert (output.token_ids, output.finish_reason) == ([5, 6], "length")


def test_a_stop_token_as_the_last_allowed_token_is_a_stop() -> None:
    output, _ = outcome(request(max_tokens=1), RowResult([9]))
    assert (output.finish_reason, output.stop_token_id) == ("stop", 9)


def test_a_stop_token_before_min_tokens_does_not_end_it() -> None:
    output, _ = outcome(request(min_tokens=2), RowResult([9, 9, 9, 5], num_draft_tokens=3))
    assert (output.token_ids, output.finish_reason) == ([9, 9, 9], "stop")


def test_a_row_without_drafts_is_a_plain_step() -> None:
    output, stats = outcome(request(), RowResult([5]))
    assert (output.finish_reason, output.stop_token_id) == (None, None)
    assert (stats.num_plain_steps, stats.num_drafts, stats.num_generated_tokens) == (1, 0, 1)


def test_a_token_that_the_grammar_forbids_ends_the_request_with_an_error() -> None:
    a = request()
    a.matcher = ParityMatcher(40)
    output, stats = outcome(a, RowResult([2, 3, 5, 6], num_draft_tokens=3))
    assert (output.token_ids, output.finish_reason) == ([2, 3], "error")
    assert "violates" in (output.error or "")
    assert a.token_ids == [1, 2, 2, 3] and stats.num_generated_tokens == 2


@pytest.mark.parametrize("token_id", [-1, 40])
def test_a_placeholder_in_a_grammar_is_an_error_not_a_token(token_id: int) -> None:
    a = request()
    a.matcher = ParityMatcher(40)
    output, _ = outcome(a, RowResult([token_id]))
    assert (output.token_ids, output.finish_reason) == ([], "error")


def test_a_grammar_that_is_left_through_its_end_stops_even_without_stop_tokens() -> None:
    a = request(stop_token_ids=[])
    a.matcher = ParityMatcher(40)
    output, _ = outcome(a, RowResult([2, 3, 0, 4], num_draft_tokens=3))
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([2, 3, 0], "stop", 0)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(0, 6),
    st.sets(st.integers(0, 9), max_size=2),
)
def test_runs_are_appended_as_token_by_token(
    runs: list[list[int]], max_tokens: int, min_tokens: int, stops: set[int]
) -> None:
    """If nothing ends within a run, the whole run is appended at once."""
    a = request(max_tokens, min_tokens=min_tokens, stop_token_ids=sorted(stops))
    expected: list[int] = []
    for run in runs:
        kept, reason = 0, None
        for token in run:
            expected.append(token)
            kept += 1
            if token in stops and len(expected) > min_tokens:
                reason = "stop"
            elif len(expected) == max_tokens:
                reason = "length"
            if reason is not None:
                break
        output, _ = outcome(a, RowResult(run, num_draft_tokens=len(run) - 1))
        assert (output.token_ids, output.finish_reason) == (run[:kept], reason)
        assert a.token_ids[2:] == expected
        if reason is not None:
            return


def test_nan_ends_only_its_request() -> None:
    bench = Bench()
    good = add("good", [4, 5, 6], stop_token_ids=[])
    bench.engine.handle([add("bad", [1, 2, 3], stop_token_ids=[]), good])
    bench.runner.nan_slots.add(0)
    bench.run()
    (output,) = bench.received["bad"].outputs
    assert output.finish_reason == "error" and "NaN" in (output.error or "")
    bench.expect(good)


def test_prompt_logprobs_come_once_and_whole_over_chunks() -> None:
    bench = Bench(max_num_batched_tokens=5)
    prompt = list(range(1, 14))
    bench.add("a", prompt, max_tokens=3, prompt_logprobs=0, stop_token_ids=[])
    bench.run()
    first, *others = bench.received["a"].outputs
    assert first.prompt_logprobs is not None
    nothing, *items = unpack_logprobs(first.prompt_logprobs)
    assert nothing is None and [item.token_id for item in items if item] == prompt[1:]
    assert all(output.prompt_logprobs is None for output in others)


def test_outputs_and_counters_sum_to_what_was_generated() -> None:
    bench = Bench(num_drafts=3)
    messages = [add(f"r{i}", [i + 1, 2, 3], max_tokens=20) for i in range(6)]
    bench.engine.handle(list(messages))
    bench.run()
    totals = bench.totals
    generated = sum(len(received.token_ids) for received in bench.received.values())
    assert totals.num_generated_tokens == generated
    assert totals.num_accepted_tokens == sum(totals.accepted_per_pos) > 0
    assert totals.accepted_per_pos == sorted(totals.accepted_per_pos, reverse=True)
    outputs = [output for received in bench.received.values() for output in received.outputs]
    assert sum(output.num_draft_tokens for output in outputs) == totals.num_draft_tokens
    assert sum(output.num_accepted_tokens for output in outputs) == totals.num_accepted_tokens


@pytest.mark.parametrize("ends_with_text", [False, True])
def test_only_a_stop_token_is_kept_from_the_text_at_a_grammars_end(ends_with_text: bool) -> None:
    class Once:
        is_terminated = False

        def accept(self, token_id: int) -> bool:
            self.is_terminated = True
            return True

    matcher: Any = Once()
    matcher.ends_with_text = ends_with_text
    request = Request.from_message(add("a", [1, 2], stop_token_ids=[]), 0, 64)
    request.matcher = matcher
    verdict = append_tokens(request, [7, 8])
    assert (verdict.num_kept, verdict.finish_reason) == (1, "stop")
    assert verdict.stop_token_id == (None if ends_with_text else 7)
