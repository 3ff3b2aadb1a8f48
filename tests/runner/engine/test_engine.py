"""The engine: steps in flight, grammars, faults, and its outputs when nothing runs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slipstream.configs.schema import Config
from slipstream.runner.engine.engine import join
from slipstream.runner.messages import GrammarSpec, ResetPrefixCache, Shutdown
from slipstream.runner.scheduling.kv_blocks import BlockGroup
from slipstream.runner.scheduling.plan import StepPlan

from ..fake_runner import FakeRunner
from ..schedule_bench import PARITY, Bench, add


def test_step_n_plus_1_is_launched_before_the_results_of_step_n_are_asked_for() -> None:
    for async_scheduling, expected in ((True, [0, 1, 1, 1]), (False, [1, 1, 1, 1])):
        bench = Bench(async_scheduling=async_scheduling)
        bench.add("a", [1, 2, 3], max_tokens=20, stop_token_ids=[])
        landed = []
        for _ in range(4):
            before = len(bench.received["a"].outputs) if "a" in bench.received else 0
            bench.step()
            after = len(bench.received["a"].outputs) if "a" in bench.received else 0
            landed.append(after - before)
        assert landed == expected
        assert len(bench.runner.plans) == 4


def test_ready_reports_the_runners_facts() -> None:
    bench = Bench(groups=(BlockGroup(30, 8),), max_model_len=48, num_drafts=2)
    ready = bench.engine.ready
    assert (ready.max_model_len, ready.num_blocks, ready.block_size) == (48, 30, 8)
    assert (ready.eos_token_ids, ready.num_speculative_tokens, ready.device) == ([0], 2, "cpu")


def test_an_idle_engine_has_no_work_and_an_abort_updates_the_gauges() -> None:
    bench = Bench()
    assert not bench.engine.has_work()
    bench.engine.handle([add("a", [1, 2, 3]), ResetPrefixCache(), Shutdown()])
    assert bench.engine.has_work()
    bench.abort("a")
    assert bench.engine.has_work()
    bench.step()
    assert bench.last_stats is not None and bench.last_stats.num_waiting == 0
    assert not bench.engine.has_work() and bench.runner.plans == []


def test_a_grammar_applies_to_drafts_and_next_to_requests_without_one() -> None:
    for accuracy in (0.0, 0.8, 1.0):
        bench = Bench(num_drafts=4, draft_accuracy=accuracy)
        messages = [
            add(f"r{i}", [i + 1, 2, 3], max_tokens=16, grammar=PARITY if i % 2 else None)
            for i in range(7)
        ]
        bench.engine.handle(list(messages))
        bench.run()
        for message in messages:
            bench.expect(message)
        masked = [plan for plan in bench.runner.plans if plan.has_grammar]
        waited = {
            any(row.num_draft_tokens for row in plan.rows): plan.needs_draft_ids for plan in masked
        }
        assert waited == {True: True, False: False}  # a step without drafts waits for none


def test_drafts_that_the_grammar_forbids_do_not_count_as_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(num_drafts=3, draft_accuracy=1.0, trim=False)
    message = add("a", [1, 2, 3], max_tokens=16, grammar=PARITY, stop_token_ids=[])
    bench.engine.handle([message])
    assert bench.engine.drafts is not None
    land = bench.engine.drafts.land
    learned: list[int] = []

    def noted(plan: StepPlan, results: Any, texts: Any) -> None:
        learned.extend(result.num_draft_tokens for result in results)
        land(plan, results, texts)

    monkeypatch.setattr(bench.engine.drafts, "land", noted)
    bench.run()
    bench.expect(message)
    totals = bench.totals
    outputs = bench.received["a"].outputs  # a step launched after the last token has none
    assert learned[: len(outputs)] == [output.num_draft_tokens for output in outputs]
    # The drafter follows the unmasked model and is right until the mask changes a token.
    assert totals.num_draft_tokens < 3 * (totals.num_drafts + totals.num_plain_steps - 1)
    assert totals.num_accepted_tokens <= totals.num_draft_tokens


def test_a_request_waits_for_its_grammar_while_others_run() -> None:
    bench = Bench(compile_at_once=False)
    slow, quick = add("slow", [1, 2], grammar=PARITY), add("quick", [3, 4])
    bench.engine.handle([slow, quick])
    while "quick" not in bench.received or bench.received["quick"].finish_reason is None:
        bench.step()
    assert "slow" not in bench.received and bench.engine.has_work()
    bench.step()  # nothing can run, so it waits briefly for the compiler
    bench.backend.finish_all()
    bench.run()
    bench.expect(slow)
    bench.expect(quick)


def test_a_grammar_that_does_not_compile_ends_only_its_request() -> None:
    bench = Bench()
    good = add("good", [3, 4])
    bad = add("bad", [1, 2], grammar=GrammarSpec("grammar", "nonsense"))
    bench.engine.handle([bad, good])
    bench.run()
    (output,) = bench.received["bad"].outputs
    assert output.finish_reason == "error" and "no such grammar" in (output.error or "")
    assert output.invalid_request
    bench.expect(good)


def test_a_fault_of_the_grammar_library_is_not_the_requests() -> None:
    bench = Bench(compile_at_once=False)
    bench.add("a", [1, 2], grammar=PARITY)
    for future in [future for _, future in bench.backend.take_waiting()]:
        future.set_exception(ImportError("no library"))
    bench.run()
    (output,) = bench.received["a"].outputs
    assert output.finish_reason == "error" and not output.invalid_request


def test_a_grammar_that_waits_too_long_for_others_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.runner.engine.request_grammars.MAX_WAIT_SECONDS", 0.05)
    bench = Bench(compile_at_once=False)
    good = add("good", [3, 4])
    bench.engine.handle([add("slow", [1, 2], grammar=PARITY), good])
    bench.run()
    (output,) = bench.received["slow"].outputs
    assert output.finish_reason == "error" and "too busy" in (output.error or "")
    assert not output.invalid_request  # the others were at fault
    bench.expect(good)


def test_the_grammar_backend_prepares_itself_before_the_first_grammar() -> None:
    bench = Bench()
    bench.engine.set_grammar_backend(bench.backend)
    assert bench.backend.is_prepared


def test_an_abort_while_its_grammar_compiles_leaves_nothing_behind() -> None:
    bench = Bench(compile_at_once=False)
    bench.add("a", [1, 2], grammar=PARITY)
    bench.step()
    bench.abort("a")
    bench.backend.finish_all()
    bench.run()
    assert bench.received == {} and bench.runner.plans == []


def test_without_a_grammar_backend_structured_output_is_an_error_not_ignored() -> None:
    runner = FakeRunner((BlockGroup(64, 4),), 64, 4, 32)
    engine = join(runner, Config())
    engine.handle([add("a", [1, 2], grammar=PARITY)])
    (step,) = engine.step()
    assert [out.finish_reason for out in step.outputs] == ["error"]
    assert not engine.has_work()


def test_a_grammar_that_fails_while_masking_ends_only_its_request() -> None:
    class Broken:
        is_terminated = ends_with_text = False

        def accept(self, token_id: int) -> bool:
            return True

        def rollback(self, num_tokens: int) -> None:
            raise AssertionError("nothing was accepted")

        def fill(self, line: Any) -> None:
            raise RuntimeError("out of luck")

    bench = Bench(compile_at_once=False)
    good = add("good", [3, 4])
    bench.engine.handle([add("bad", [1, 2], grammar=PARITY), good])
    for _, future in bench.backend._waiting:
        future.set_result(Broken())
    bench.backend._waiting.clear()
    bench.run()
    assert bench.received["bad"].finish_reason == "error"
    assert "out of luck" in (bench.received["bad"].outputs[-1].error or "")
    bench.expect(good)


def test_news_interrupt_a_wait_for_results_so_that_an_abort_frees_row_and_blocks_at_once() -> None:
    bench = Bench()
    bench.add("long", list(range(1, 40)), max_tokens=20, stop_token_ids=[])
    other = add("other", [1, 2, 3])
    bench.step()  # one step is in flight
    bench.runner.is_slow = True
    bench.engine.handle([other])
    (news,) = bench.engine.step(lambda: True)  # came back, though two are in flight now
    assert news.outputs == [] and news.stats.num_running == 2 == len(bench.runner.plans)
    bench.abort("long")
    (news,) = bench.engine.step(lambda: True)
    assert news.outputs == [] and news.stats.num_running + news.stats.num_waiting == 1
    bench.check_books()
    bench.runner.is_slow = False
    bench.run()
    assert "long" not in bench.received
    bench.expect(other)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_interruptions_at_any_moment_change_no_output(async_scheduling: bool) -> None:
    """Also between the forward pass and the mask of a step with a grammar."""
    chance = random.Random(1)
    for accuracy in (0.3, 0.9):
        bench = Bench(num_drafts=3, draft_accuracy=accuracy, async_scheduling=async_scheduling)
        step = bench.engine.step
        bench.engine.step = lambda step=step: step(lambda: True)  # type: ignore[method-assign,misc]
        kept = []
        for number in range(30):
            grammar = PARITY if number % 2 else None
            message = add(f"r{number}", [number % 30 + 1, 2, 3], max_tokens=12, grammar=grammar)
            bench.engine.handle([message])
            bench.runner.is_slow = chance.random() < 0.7
            bench.step()
            if chance.random() < 0.4:
                bench.abort(message.request_id)
            else:
                kept.append(message)
        bench.runner.is_slow = False
        bench.run()
        for message in kept:
            bench.expect(message)


def test_a_fault_of_the_runner_is_raised() -> None:
    class FaultyRunner(FakeRunner):
        def execute(self, plan: StepPlan) -> Any:
            raise RuntimeError("device lost")

    engine = join(FaultyRunner((BlockGroup(64, 4),), 64, 4, 32), Config())
    engine.handle([add("a", [1, 2])])
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_shutdown_lets_steps_in_flight_end() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], max_tokens=20, stop_token_ids=[])
    bench.step()
    bench.engine.shutdown()
    assert bench.runner.was_shut_down and bench.backend.was_shut_down
    assert not bench.runner._queue


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad_words_token_ids": [[1] * 20_000]}, "bad_words has 20000 tokens, but the limit"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 tokens"),
        ({"stop_token_ids": list(range(2049))}, "stop_token_ids has 2049 tokens"),
        ({"prediction_token_ids": [1] * 65}, "prediction has 65 tokens, but the limit is 64"),
    ],
)
def test_a_list_that_is_too_long_ends_only_its_request(options: dict[str, Any], words: str) -> None:
    bench = Bench(max_model_len=64)
    bench.add("good", [1, 2], max_tokens=3)
    bench.add("bad", [1, 2], max_tokens=3, **options)
    bench.run()
    (output,) = bench.received["bad"].outputs
    assert output.finish_reason == "error" and words in (output.error or "")
    assert output.invalid_request
    bench.expect(add("good", [1, 2], max_tokens=3))


def test_a_fault_while_a_request_is_added_ends_only_this_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.engine._grammars, "compile", lambda request, spec: 1 // 0)
    good, bad = add("good", [1, 2]), add("bad", [3, 4], grammar=PARITY)
    bench.engine.handle([bad, good])
    bench.run()
    (output,) = bench.received["bad"].outputs
    assert output.finish_reason == "error" and "ZeroDivisionError" in (output.error or "")
    bench.expect(good)
