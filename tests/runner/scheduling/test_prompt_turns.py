"""Short prompts overtake long ones within a bound; order, blocks and slots hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.runner.messages import AddRequest
from slipstream.runner.scheduling.kv_blocks import BlockGroup
from slipstream.runner.scheduling.prompt_turns import PromptTurns
from slipstream.runner.scheduling.step_time import StepBudget, StepTimes

from ..schedule_bench import Bench, add

MAX_LEN = 4096
ROOMY = (BlockGroup(600, 64),)


def bench(budget: int = 64, groups: Sequence[BlockGroup] = ROOMY, **options: Any) -> Bench:
    """An engine on a "GPU", where the duration of steps has no bound."""
    usual = {"max_num_seqs": 16, "device": "cuda", "caching": False, "max_model_len": MAX_LEN}
    return Bench(groups, max_num_batched_tokens=budget, **(usual | options))


def prompt(name: str, length: int, max_tokens: int = 1, **options: Any) -> AddRequest:
    rng = random.Random(name)
    ids = [rng.randint(1, 39) for _ in range(length)]
    return add(name, ids, max_tokens, stop_token_ids=[], **options)


def finish_steps(engine: Bench, arrivals: Sequence[tuple[int, AddRequest]]) -> dict[str, int]:
    """Run requests that arrive at given steps; request id -> the step that ended its prompt."""
    waiting, ended, step = sorted(arrivals, key=lambda item: item[0]), {}, 0
    while waiting or engine.engine.has_work():
        while waiting and waiting[0][0] <= step:
            engine.engine.handle([waiting.pop(0)[1]])
        if engine.engine.has_work():
            engine.step()
        step += 1
        for name, received in engine.received.items():
            if received.token_ids:
                ended.setdefault(name, step)
        assert step < 5000
    engine.check_idle()
    return ended


def chunks(engine: Bench) -> list[list[int]]:
    """The tokens of each row of each step."""
    return [[row.num_tokens for row in plan.rows] for plan in engine.runner.plans]


def test_a_short_prompt_is_computed_beside_a_long_one() -> None:
    engine = bench()
    ended = finish_steps(engine, [(0, prompt("long", 2000)), (3, prompt("short", 20))])
    assert ended["short"] <= 3 + 3  # its step, and two for results in flight
    assert ended["long"] <= -(-2020 // 64) + 2  # no token of any step is wasted
    assert [44, 20] in [sorted(step, reverse=True) for step in chunks(engine)]


def test_a_newcomer_gets_at_most_half_of_a_step() -> None:
    engine = bench()
    finish_steps(engine, [(0, prompt("long", 2000)), (3, prompt("medium", 300))])
    shared = [step for step in chunks(engine) if len(step) == 2]
    assert len(shared) == 10 and all(step == [32, 32] for step in shared[:9])


def test_the_shortest_of_several_goes_first() -> None:
    engine = bench()
    ended = finish_steps(
        engine,
        [(0, prompt("long", 3000)), (2, prompt("medium", 700)), (3, prompt("short", 16))],
    )
    assert ended["short"] <= 6 and ended["medium"] < ended["long"]


def test_equal_prompts_are_computed_in_order_of_arrival_one_after_the_other() -> None:
    engine = bench()
    names = [f"p{i}" for i in range(6)]
    ended = finish_steps(
        engine, [(0, prompt(name, 500 + 17 * (i % 3))) for i, name in enumerate(names)]
    )
    assert sorted(names, key=ended.__getitem__) == names
    total = sum(500 + 17 * (i % 3) for i in range(6))
    assert max(ended.values()) <= -(-total // 64) + 2
    done = [-(-sum(500 + 17 * (j % 3) for j in range(i + 1)) // 64) for i in range(6)]
    assert [ended[name] for name in names] == pytest.approx(done, abs=2)


@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_takes_more_than_twice_the_steps_of_the_order_of_arrival(seed: int) -> None:
    """The bound, under a stream of newcomers that would starve a long prompt without it."""
    rng, budget = random.Random(seed), 64
    arrivals: list[tuple[int, AddRequest]] = []
    lengths: dict[str, int] = {}
    at = 0
    for index in range(50):
        length = rng.choice([1200, 500, 60, 30, 12, 8]) if index else 2500
        name = f"p{index}"
        lengths[name] = length
        arrivals.append((at, prompt(name, length)))
        at += rng.choice([0, 0, 1, 1, 2])
    engine = bench(budget, (BlockGroup(1200, 64),), max_num_seqs=128)
    ended = finish_steps(engine, arrivals)
    work = 0  # tokens of all earlier arrivals and its own
    for arrived, message in arrivals:
        work += lengths[message.request_id]
        # It starts after earlier work, and each step is at least half in order of arrival. Two
        # steps are in flight, and a prompt that enters last may wait for one more.
        assert ended[message.request_id] <= arrived + 2 * -(-work // budget) + 4
    assert max(ended.values()) <= at + -(-work // budget) + 4  # and no step was wasted
    shorts = [ended[m.request_id] - at for at, m in arrivals if lengths[m.request_id] <= 60]
    assert sorted(shorts)[len(shorts) // 2] <= 12


def test_priorities_hold() -> None:
    engine = bench()
    ended = finish_steps(
        engine,
        [
            (0, prompt("long", 2000, priority=1)),
            (3, prompt("later", 20, priority=2)),
            (3, prompt("urgent", 600, priority=0)),
        ],
    )
    assert ended["urgent"] <= 3 + -(-600 // 64) + 3  # all of each step
    assert ended["later"] >= ended["long"]  # a worse priority overtakes nothing


def test_whom_a_newcomer_overtakes_still_finds_blocks_and_a_slot() -> None:
    """The long prompt needs 61 of 64 blocks, one for its output included."""
    groups = (BlockGroup(65, 64),)
    engine = bench(groups=groups)
    engine.engine.handle([prompt("long", 3900)])
    engine.step()
    engine.engine.handle([prompt("fits", 100, 40), prompt("not", 100, 40)])
    for _ in range(8):
        engine.step()
    running = {request.request_id for request in engine.scheduler.running}
    assert "long" in running and "not" not in running
    engine.run()
    assert engine.totals.num_preemptions == 0
    engine = bench(max_num_seqs=2)
    engine.engine.handle([prompt("long", 2000), prompt("second", 2000), prompt("short", 8, 900)])
    for _ in range(10):
        engine.step()
    assert {request.request_id for request in engine.scheduler.running} == {"long"}
    engine.run()


def test_a_decode_that_overtook_keeps_its_drafts_beside_the_long_prompt() -> None:
    engine = bench(num_drafts=3)
    engine.engine.handle([prompt("long", 3000)])
    engine.step()
    engine.engine.handle([prompt("short", 8, 60)])
    for _ in range(10):
        engine.step()
    plans = engine.runner.plans[6:]
    decodes = [row for plan in plans for row in plan.rows if row.num_tokens <= 4]
    assert len(decodes) == len(plans) and all(row.num_draft_tokens == 3 for row in decodes)
    assert all(sum(row.num_tokens for row in plan.rows) == 64 for plan in plans)
    engine.run()


def test_the_last_arrived_is_preempted_although_it_overtook() -> None:
    groups = (BlockGroup(65, 64),)
    engine = bench(groups=groups, max_num_seqs=3)
    engine.engine.handle([prompt("long", 3900, 150)])
    engine.step()
    engine.engine.handle([prompt("short", 40, 200)])  # its output needs blocks of the long one's
    gone = set()
    while engine.engine.has_work():
        engine.step()
        running = {request.request_id for request in engine.scheduler.running}
        gone |= {request.request_id for request in engine.scheduler.waiting} - running
    assert engine.totals.num_preemptions > 0 and "long" not in gone
    for name in ("long", "short"):
        assert engine.received[name].finish_reason == "length"


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_cancelled_prompt_stops_at_the_next_chunk(in_flight: bool) -> None:
    engine = bench(async_scheduling=in_flight)
    engine.engine.handle([prompt("long", 3000), prompt("other", 500)])
    for _ in range(4):
        engine.step()
    slot = next(r.slot for r in engine.scheduler.running if r.request_id == "long")
    launched = len(engine.runner.plans)
    engine.abort("long")
    engine.step()
    first = engine.runner.plans[launched]
    assert slot in first.freed_slots
    assert [(row.slot == slot, row.num_tokens) for row in first.rows] == [(False, 64)]
    engine.run()
    assert engine.received["other"].finish_reason == "length" and "long" not in engine.received


def test_cached_prefixes_are_found_by_those_that_overtake() -> None:
    engine = bench(caching=True)
    shared = prompt("first", 200)
    engine.engine.handle([shared])
    engine.run()
    engine.engine.handle([prompt("long", 3000)])
    engine.step()
    again = add("again", [*shared.prompt_token_ids, 7, 7], 3, stop_token_ids=[])
    engine.engine.handle([again])
    engine.run()
    engine.expect(again)
    assert engine.received["again"].outputs[0].num_cached_tokens == 192


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_of_plain_decoding_whoever_overtakes(seed: int) -> None:
    rng = random.Random(seed)
    engine = bench(
        40,
        rng.choice([(BlockGroup(90, 4),), (BlockGroup(90, 4), BlockGroup(60, 4, 20))]),
        num_drafts=rng.choice([0, 3]),
        max_num_seqs=rng.choice([3, 6]),
        caching=rng.random() < 0.7,
        max_itl_ms=rng.choice([None, 5.0]),
        max_model_len=200,
    )
    messages = [
        prompt(
            f"p{i}",
            rng.choice([150, 60, 20, 5]),
            rng.randint(1, 20),
            priority=rng.choice([0, 0, 1]),
        )
        for i in range(20)
    ]
    ended = finish_steps(engine, [(rng.randint(0, 30), message) for message in messages])
    assert len(ended) == len(messages)
    for message in messages:
        engine.expect(message)


class Prompt:
    """What turns read of a request that computes its prompt or waits."""

    priority, num_prefilled, blocks, is_blocked, wants_prompt_logprobs = 0, 0, None, False, False

    def __init__(self, length: int, arrival: int) -> None:
        self.token_ids, self.prefill_len = [0] * length, length
        self.arrival, self.order = arrival, (0, arrival)


def share(budget: StepBudget, *waiting: Prompt) -> dict[Prompt, int]:
    """The tokens of those that overtake a long prompt, where there is room for all."""
    turns: Any = PromptTurns(budget, [], 1)
    turns.share(Prompt(2000, 0), waiting, SimpleNamespace(take=lambda request: True))
    shares: dict[Prompt, int] = turns.overtaking
    return shares


def test_the_time_that_those_who_overtake_leave_goes_to_the_first_prompt() -> None:
    budget, short = StepBudget(64, StepTimes(), seconds=0.1), Prompt(4, 1)
    assert budget.times is not None and share(budget, short) == {short: 4}
    _, used = budget.times.fit(4, 0, False, 0.05, False)
    assert 0 < used < 0.05 and budget.seconds == pytest.approx(0.1 - used)


def test_whoever_waits_for_a_grammar_overtakes_nobody() -> None:
    blocked, short = Prompt(4, 1), Prompt(4, 2)
    blocked.is_blocked = True
    assert share(StepBudget(64), blocked, short) == {short: 4}


def test_tokens_kept_for_decodes_are_free_once_each_has_its_own() -> None:
    behind: list[Any] = [Prompt(4, arrival) for arrival in (1, 2)]
    for request in behind:
        request.num_prefilled = 4
    long: Any = Prompt(2000, 0)
    turns = PromptTurns(StepBudget(20), behind, width=6)
    for free in (8, 14, 20):
        assert turns.take(long) == free
        turns.pass_decode()
