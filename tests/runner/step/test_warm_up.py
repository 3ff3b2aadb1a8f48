"""Made-up first steps leave nothing behind that a request could see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_target import TinySetup, make_runner, tiny_llama

from slipstream.configs.schema import StepLimits
from slipstream.kernels.linear.linear_choice import bucket_of
from slipstream.runner.messages import SamplingParams
from slipstream.runner.scheduling.plan import NewRequest, ScheduledRow, StepPlan
from slipstream.runner.step.warm_up import rare_steps, warm_up_steps, wide_batches


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def first_tokens(runner: Any) -> list[int]:
    """Of a greedy request: what the prefill and two decodes emit."""
    new = NewRequest(0, [5, 6, 7, 8], 4, 0, [[1, 2]], SamplingParams(0, 8, temperature=0.0))
    rows = [ScheduledRow(0, 4, 0, 0, False, 0)]
    tokens = runner.execute(StepPlan(1, new_requests=[new], rows=rows)).get()[0].token_ids
    for step in range(2):
        rows = [ScheduledRow(0, 1, 0, 4 + step, False, 1 + step)]
        tokens += runner.execute(StepPlan(2 + step, rows=rows)).get()[0].token_ids
    return tokens


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_request_after_the_first_steps_gets_the_text_that_it_gets_without(
    model: Any, num_drafts: int
) -> None:
    def script(slot: int, known: list[int]) -> list[int]:
        return [1] * num_drafts

    setup = TinySetup(num_drafts=num_drafts)
    texts = []
    for warm in (False, True):
        runner = make_runner(model, setup, script if num_drafts else None)
        steps = 0
        if warm:
            execute = runner.execute

            def count(plan: StepPlan, execute: Any = execute) -> Any:
                nonlocal steps
                steps += 1
                return execute(plan)

            runner.execute = count  # type: ignore[method-assign]
            warm_up_steps(runner)
            rare_steps(runner)
            assert steps >= 20
            assert all(bool(kv.isfinite().all()) for kv in runner._target.cache.kv_caches.values())
            counts = torch.tensor([runner.table.sampling._features[slot] for slot in range(2)])
            assert not counts.any()
        texts.append(first_tokens(runner))
        runner.shutdown()
    assert len(texts[0]) == 3 and texts[0] == texts[1]


@pytest.mark.parametrize("max_num_tokens", [4, 8, 9])
def test_prompts_of_the_first_steps_fit_into_a_small_step(model: Any, max_num_tokens: int) -> None:
    runner = make_runner(model, TinySetup(max_num_reqs=2, max_num_tokens=max_num_tokens))
    execute, largest = runner.execute, 0

    def count(plan: StepPlan) -> Any:
        nonlocal largest
        largest = max(largest, sum([row.num_tokens for row in plan.rows]))
        return execute(plan)

    runner.execute = count  # type: ignore[method-assign]
    warm_up_steps(runner)
    assert max_num_tokens - 1 <= largest <= max_num_tokens
    runner.shutdown()


@pytest.mark.parametrize("max_num_tokens", [21, 32])
def test_rare_steps_have_the_longest_prompt_of_a_step(model: Any, max_num_tokens: int) -> None:
    runner = make_runner(model, TinySetup(max_num_reqs=2, max_num_tokens=max_num_tokens))
    execute, prompts = runner.execute, set()

    def count(plan: StepPlan) -> Any:
        prompts.update(row.num_tokens for row in plan.rows)
        return execute(plan)

    runner.execute = count  # type: ignore[method-assign]
    rare_steps(runner)
    assert {1, 2, 4, 8, 16, max_num_tokens} <= prompts
    runner.shutdown()


def test_steps_that_do_not_fit_are_left_out(model: Any) -> None:
    runner = make_runner(model, TinySetup(num_blocks=2))
    runner.execute = None  # type: ignore[method-assign, assignment]
    warm_up_steps(runner)
    rare_steps(runner)
    runner.shutdown()


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8, 16])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 16, 40, 64, 500])
def test_first_steps_meet_every_bucket_of_rows_that_requests_can_make(
    max_num_seqs: int, num_drafts: int
) -> None:
    width = num_drafts + 1
    limits = StepLimits(max_num_seqs, max_num_batched_tokens=max_num_seqs * width + 1)
    sizes = wide_batches(limits, num_drafts)
    assert all(1 < size <= max_num_seqs for size in sizes) and len(sizes) <= 7
    rows = [1, *sizes, *(((size - 1) * width + 1) for size in sizes if num_drafts)]
    possible = range(1, (max_num_seqs - 1) * width + 2)  # one of them ends its prompt
    assert {bucket_of(n) for n in rows} == {bucket_of(n) for n in possible}
