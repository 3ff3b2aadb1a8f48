"""The scheduler's rules, one at a time."""

from __future__ import annotations

import pytest

from slipstream.configs.options import ConfigError
from slipstream.configs.schema import StepLimits
from slipstream.runner.scheduling.kv_blocks import BlockGroup, KVBlocks
from slipstream.runner.scheduling.plan import RowResult, StepPlan
from slipstream.runner.scheduling.scheduler import Scheduler

from ..schedule_bench import Bench, add


def make(
    num_blocks: int = 64,
    max_model_len: int = 64,
    max_num_seqs: int = 4,
    budget: int = 32,
    num_drafts: int = 0,
    chunked: bool = True,
    **options: int,
) -> Scheduler:
    kv = KVBlocks([BlockGroup(num_blocks, 4)], max_model_len, budget)
    limits = StepLimits(max_num_seqs, budget)
    return Scheduler(limits, kv, max_model_len, num_drafts, chunked=chunked, **options)  # type: ignore[arg-type]


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [
        (r.num_computed_tokens, r.num_tokens, r.num_draft_tokens, r.is_prefill) for r in plan.rows
    ]


def test_a_long_prompt_comes_in_chunks_and_the_last_one_samples() -> None:
    scheduler = make(budget=8)
    scheduler.add(add("a", range(1, 21)))
    plans = [plan_of(scheduler) for _ in range(3)]
    assert [shape(plan) for plan in plans] == [
        [(0, 8, 0, True)],
        [(8, 8, 0, True)],
        [(16, 4, 0, False)],
    ]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make(budget=32, max_model_len=32, chunked=False)
    scheduler.add(add("a", range(1, 21)))
    scheduler.add(add("b", range(1, 18), max_tokens=2))
    first = plan_of(scheduler)
    assert shape(first) == [(0, 20, 0, False)]
    second = plan_of(scheduler)
    assert shape(second) == [(20, 1, 0, False), (0, 17, 0, False)]


def test_unchunked_budget_below_the_longest_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least max_model_len"):
        make(budget=16, chunked=False)


def test_waiting_requests_enter_by_priority_then_arrival() -> None:
    scheduler = make(max_num_seqs=2)
    for name, priority in (("late", 1), ("b", 0), ("c", 0), ("urgent", -1)):
        scheduler.add(add(name, [1, 2, 3], priority=priority))
    plan_of(scheduler)
    assert [request.request_id for request in scheduler.running] == ["urgent", "b"]
    assert [request.request_id for request in scheduler.waiting] == ["c", "late"]


def test_a_prefill_chunk_leaves_a_token_for_every_running_request() -> None:
    scheduler = make(budget=6)
    scheduler.add(add("a", [1, 2, 3]))
    scheduler.add(add("b", [1, 2, 3]))
    plan_of(scheduler)
    scheduler.abort(["a"])
    scheduler.add(add("c", range(1, 30), priority=-1))
    assert shape(plan_of(scheduler)) == [(3, 1, 0, False), (0, 5, 0, True)]
    # Now "c" comes first, and still "b" decodes.
    assert shape(plan_of(scheduler)) == [(4, 1, 0, False), (5, 5, 0, True)]


def test_the_first_decode_step_already_carries_drafts() -> None:
    scheduler = make(num_drafts=3)
    scheduler.add(add("a", [1, 2, 3]))
    assert shape(plan_of(scheduler)) == [(0, 3, 0, False)]
    assert shape(plan_of(scheduler)) == [(3, 4, 3, False)]


def test_the_next_step_starts_at_the_upper_bound_and_a_result_takes_the_rest_back() -> None:
    scheduler = make(num_drafts=3)
    request = scheduler.add(add("a", [1, 2, 3], max_tokens=30))
    assert request is not None
    prefill, verify = plan_of(scheduler), plan_of(scheduler)
    scheduler.apply(prefill, [RowResult([5])])
    following = plan_of(scheduler)
    assert shape(following) == [(7, 4, 3, False)]
    scheduler.apply(verify, [RowResult([6, 7], num_draft_tokens=3)])
    assert request.token_ids == [1, 2, 3, 5, 6, 7]
    assert (request.max_len, request.num_computed_tokens) == (10, 9)
    scheduler.apply(following, [RowResult([8], num_draft_tokens=0)])
    assert request.num_computed_tokens == 6
    assert shape(plan_of(scheduler)) == [(6, 4, 3, False)]


def test_rows_are_ordered_full_drafts_shorter_drafts_extends_prefills() -> None:
    scheduler = make(budget=40, num_drafts=3, max_num_seqs=8)
    scheduler.add(add("plain", [1, 2], speculative_enabled=False))
    scheduler.add(add("short", [1, 2], speculative_max_tokens=1))
    scheduler.add(add("full", [1, 2]))
    plan_of(scheduler)
    scheduler.add(add("long", range(1, 50)))
    scheduler.add(add("unseen", [1, 2]))
    plan = plan_of(scheduler)
    assert shape(plan) == [(2, 4, 3, False), (2, 2, 1, False), (2, 1, 0, False), (0, 33, 0, True)]


def test_drafts_shrink_towards_max_tokens_unless_the_batch_shall_stay_uniform() -> None:
    for uniform, expected in ((False, 1), (True, 3)):
        scheduler = make(num_drafts=3, uniform_drafts=uniform)
        scheduler.add(add("a", [1, 2, 3], max_tokens=3))
        plan_of(scheduler)
        # One of three tokens is in flight: of this row's, two can be used.
        assert plan_of(scheduler).rows[0].num_draft_tokens == expected


def test_a_request_certain_to_end_is_not_scheduled_again() -> None:
    scheduler = make(num_drafts=3)
    scheduler.add(add("a", [1, 2, 3], max_tokens=2))
    prefill, decode = plan_of(scheduler), plan_of(scheduler)
    assert scheduler.schedule() is None
    scheduler.apply(prefill, [RowResult([5])])
    out = scheduler.apply(decode, [RowResult([6])])
    assert out.outputs[0].finish_reason == "length"


def test_no_position_passes_the_context_even_if_every_draft_is_accepted() -> None:
    scheduler = make(num_drafts=3, max_model_len=12, num_blocks=64)
    scheduler.add(add("a", [1, 2, 3, 4, 5], max_tokens=100, stop_token_ids=[]))
    prefill, decode = plan_of(scheduler), plan_of(scheduler)
    following = plan_of(scheduler)
    assert shape(following) == [(9, 2, 1, False)]  # at most tokens 0 .. 11 after it
    assert scheduler.schedule() is None  # what is in flight may fill the context
    scheduler.apply(prefill, [RowResult([9])])
    scheduler.apply(decode, [RowResult([9], num_draft_tokens=3)])
    assert shape(plan_of(scheduler)) == [(8, 3, 2, False)]
    assert following.step_id == 2


def test_an_impossible_request_ends_with_an_error_and_the_others_live() -> None:
    bench = Bench(max_model_len=16)
    bench.add("empty", [])
    bench.add("long", range(16))
    bench.add("none", [1, 2], max_tokens=0)
    bench.add("good", [1, 2, 3])
    bench.run()
    for name, word in (("empty", "no tokens"), ("long", "max_model_len"), ("none", "max_tokens")):
        (output,) = bench.received[name].outputs
        assert output.finish_reason == "error" and word in (output.error or "")
    bench.expect(add("good", [1, 2, 3]))


def test_the_latest_request_of_the_lowest_priority_is_preempted() -> None:
    scheduler = make(num_blocks=11, max_model_len=40, max_num_seqs=3)
    for name, priority in (("low", 5), ("old", 0), ("new", 0)):
        scheduler.add(add(name, [1] * 11, max_tokens=25, priority=priority, stop_token_ids=[]))
    plans = [plan_of(scheduler)]
    scheduler.apply(plans[0], [RowResult([1])] * 3)
    gone = []
    while len(scheduler.running) > 1:
        before = {request.request_id for request in scheduler.running}
        plan = plan_of(scheduler)
        gone += sorted(before - {request.request_id for request in scheduler.running})
        scheduler.apply(plan, [RowResult([1])] * len(plan.rows))
    assert gone == ["low", "new"]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    bench = Bench(groups=(BlockGroup(13, 4),), max_model_len=40, max_num_batched_tokens=12)
    messages = [add(f"r{i}", [i + 1] * 12, max_tokens=20, stop_token_ids=[]) for i in range(2)]
    bench.engine.handle(list(messages))
    bench.run()
    assert bench.totals.num_preemptions > 0
    readmitted = [new for plan in bench.runner.plans for new in plan.new_requests][2:]
    assert any(new.num_computed_tokens >= 8 for new in readmitted)
    for message in messages:
        bench.expect(message)
        assert bench.received[message.request_id].outputs[0].num_cached_tokens == 0


def test_results_of_an_earlier_life_are_dropped() -> None:
    """A request is preempted and admitted again before its old result lands."""
    scheduler = make(num_blocks=11, max_model_len=40, max_num_seqs=2)
    scheduler.add(add("a", [1] * 19, max_tokens=20, stop_token_ids=[]))
    request = scheduler.add(add("b", [2] * 12, max_tokens=20, stop_token_ids=[]))
    assert request is not None
    first = plan_of(scheduler)
    old = [index for index, row in enumerate(first.rows) if row.slot == request.slot]
    while request.incarnation == 0:
        plan_of(scheduler)
    scheduler.abort(["a"])
    plan_of(scheduler)
    assert request.slot >= 0 and request.num_rows_in_flight == 1
    out = scheduler.apply(first, [RowResult([7]) for _ in first.rows])
    assert len(old) == 1 and out.outputs == [] and request.token_ids == [2] * 12
    assert request.num_rows_in_flight == 1


def test_an_abort_while_steps_are_in_flight_frees_at_once_and_silences_them() -> None:
    bench = Bench(num_drafts=2)
    bench.add("a", [1, 2, 3], max_tokens=30, stop_token_ids=[])
    for _ in range(3):
        bench.step()
    seen = len(bench.received["a"].outputs)
    bench.abort("a")
    bench.check_books()
    assert bench.kv.usage == 0.0
    bench.run()
    assert len(bench.received["a"].outputs) == seen
    assert bench.received["a"].finish_reason is None


def test_a_window_group_alone_near_its_limit_waits_rather_than_preempts_itself() -> None:
    group = BlockGroup(8, 2, sliding_window=4)  # 7 blocks: window 3 + step 8 + slack
    bench = Bench(groups=(group,), max_model_len=60, max_num_batched_tokens=8)
    message = add("a", range(1, 40), max_tokens=10, stop_token_ids=[])
    bench.engine.handle([message])
    bench.run()
    bench.expect(message)
    assert bench.totals.num_preemptions == 0


def test_a_prefix_hit_is_counted_and_reported_once() -> None:
    bench = Bench()
    bench.add("a", range(1, 13), max_tokens=2)
    bench.run()
    bench.add("b", range(1, 13), max_tokens=2)
    bench.run()
    assert [out.num_cached_tokens for out in bench.received["b"].outputs] == [8, 0]
    assert (bench.totals.prefix_cache_queries, bench.totals.prefix_cache_hits) == (24, 8)
    assert bench.totals.num_prompt_tokens == 12 + 4


def test_the_number_of_drafts_can_change_while_serving() -> None:
    scheduler = make(num_drafts=3)
    scheduler.add(add("a", [1, 2, 3], max_tokens=30))
    plan_of(scheduler)
    scheduler.set_num_speculative_tokens(1)
    assert plan_of(scheduler).rows[0].num_tokens == 2
    scheduler.set_num_speculative_tokens(0)
    assert plan_of(scheduler).rows[0].num_tokens == 1


def test_requests_share_a_prefix_only_with_those_of_their_salt() -> None:
    """Cached tokens reveal nothing about prompts of clients with another salt, or with none."""
    bench, prompt = Bench(), list(range(1, 14))
    salts = ["", "mine", "yours", "", "mine", "yours", "mi"]
    for index, salt in enumerate(salts):
        bench.add(str(index), prompt, 2, cache_salt=salt)
        bench.run()
    cached = [bench.received[str(i)].outputs[0].num_cached_tokens for i in range(len(salts))]
    assert cached == [0, 0, 0, 12, 12, 12, 0]


def test_requests_that_run_at_once_share_blocks_only_with_their_salt() -> None:
    bench, prompt = Bench(), list(range(1, 14))
    for index, salt in enumerate(("mine", "yours")):
        bench.add(f"first-{index}", prompt, 30, cache_salt=salt)
    bench.step()
    bench.step()
    bench.step()
    for index, salt in enumerate(("mine", "yours")):
        bench.add(f"second-{index}", prompt, 30, cache_salt=salt)
    bench.step()
    held = {request.request_id: request.blocks for request in bench.scheduler.running}
    tables = {name: blocks.tables[0][:3] for name, blocks in held.items() if blocks is not None}
    assert tables["first-0"] == tables["second-0"] and tables["first-1"] == tables["second-1"]
    assert not set(tables["first-0"]) & set(tables["first-1"])
    bench.run()
