"""Steps on a CPU, or with --max-itl-ms, are bounded by time: streams soon get their next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from slipstream.runner.scheduling.kv_blocks import BlockGroup
from slipstream.runner.scheduling.plan import StepPlan
from slipstream.runner.scheduling.policy import CPU_STEP_TOKENS
from slipstream.runner.scheduling.step_time import (
    LEAST_TOKENS,
    LIMIT_SECONDS,
    PROMPT_SECONDS,
    StepTimes,
)

from ..fake_runner import FakeHandle
from ..schedule_bench import Bench, Received

BOUND = 1.25 * LIMIT_SECONDS  # 250 ms


@dataclass(frozen=True)
class Machine:
    """The simulated duration of a step, in seconds."""

    fixed: float = 0.020
    token: float = 0.0025
    key: float = 6e-6
    pair: float = 1.5e-6
    logprobs: float = 0.004  # of one prompt token
    weights: float = 0.0  # reading them hides the time of tokens until those take longer

    def seconds(self, plan: StepPlan, wants_logprobs: set[int]) -> float:
        num_rows = sum(row.num_tokens for row in plan.rows)
        total = max(self.fixed, self.weights - num_rows * self.token)
        for row in plan.rows:
            count, context = row.num_tokens, row.num_computed_tokens
            total += count * self.token + self.key * context
            total += self.pair * count * (context + count / 2)
            total += self.logprobs * count * (row.slot in wants_logprobs)
        return total


class TimedBench(Bench):
    """An engine over a fake runner with simulated step durations."""

    def __init__(
        self,
        machine: Machine,
        max_model_len: int = 4096,
        max_num_seqs: int = 8,
        max_itl_ms: float | None = None,
        **options: Any,
    ) -> None:
        groups = (BlockGroup(max_num_seqs * max_model_len // 64 + 1, 64),)
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048} | options
        super().__init__(groups, max_model_len, max_itl_ms=max_itl_ms, **limits)
        self.machine, self.now = machine, 0.0
        self.steps: list[tuple[float, StepPlan]] = []
        self._wants_logprobs: set[int] = set()
        if self.scheduler._times is not None:
            self.scheduler._times._clock = lambda: self.now
        self._execute = self.runner.execute
        self.runner.execute = self._timed  # type: ignore[method-assign]

    def _timed(self, plan: StepPlan) -> FakeHandle:
        self._wants_logprobs -= set(plan.freed_slots)
        self._wants_logprobs |= {
            new.slot for new in plan.new_requests if new.sampling.prompt_logprobs is not None
        }
        seconds = self.machine.seconds(plan, self._wants_logprobs)
        self.steps.append((seconds, plan))
        handle = self._execute(plan)
        get: Callable[[], list] = handle.get  # type: ignore[type-arg]

        def ended() -> list:  # type: ignore[type-arg]
            self.now += seconds
            return get()

        handle.get = ended  # type: ignore[method-assign]
        return handle

    def stream(self) -> None:
        """Add a short request that decodes while others run."""
        self.send("stream", [1, 2, 3], max_tokens=3000)
        for _ in range(20):
            self.step()
        self.steps.clear()

    def num_tokens(self, request_id: str) -> int:
        """Number of tokens that a request has received."""
        return len(self.received.get(request_id, Received()).token_ids)

    def step_until(self, request_id: str, num_tokens: int = 1) -> None:
        """Step until a request has `count` tokens."""
        while self.num_tokens(request_id) < num_tokens:
            self.step()

    def send(self, request_id: str, prompt: list[int], max_tokens: int, **options: object) -> None:
        """Parameters of a request that ends only at `max_tokens`."""
        self.add(request_id, prompt, max_tokens, stop_token_ids=[], **options)


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 39 + 1 for i in range(length)]


@pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        Machine(token=0.010, pair=5e-6),
        Machine(fixed=0.003, token=0.0004, key=1e-6, pair=2e-7, logprobs=0.001),
        Machine(key=1e-7, pair=1e-8),
        Machine(pair=8e-6),
    ],
)
@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 5}])
def test_a_long_prompt_does_not_hold_a_stream(machine: Machine, options: dict[str, int]) -> None:
    bench = TimedBench(machine)
    bench.stream()
    began = bench.now
    bench.send("long", prompt(3500), max_tokens=1, **options)
    bench.step_until("long")
    seconds = [taken for taken, _ in bench.steps]
    assert max(seconds[4:]) < BOUND  # the first ones tell what it costs
    assert max(seconds) < 2 * BOUND
    assert all(len(plan.rows) == 2 for _, plan in bench.steps[1:-2])  # the stream is in each
    # Prompts still get most of the time: it is not much longer than in the largest steps.
    logprobs = 3500 * machine.logprobs if options else 0
    alone = 3500 * (machine.token + 1750 * machine.pair) + logprobs
    assert bench.now - began < 2 * alone + 1


def test_a_prompt_that_runs_alone_gets_long_steps() -> None:
    bench = TimedBench(Machine())
    bench.send("long", prompt(3500), max_tokens=1)
    bench.run()
    chunks = [(taken, plan.rows[0].num_tokens) for taken, plan in bench.steps]
    assert chunks[0][1] == CPU_STEP_TOKENS and chunks[2][1] > 150
    assert max(taken for taken, _ in chunks[3:]) < 1.25 * PROMPT_SECONDS
    assert min(count for _, count in chunks[3:-1]) > 50


def test_several_prompts_share_a_step() -> None:
    bench = TimedBench(Machine())
    bench.stream()
    for index in range(5):
        bench.send(f"p{index}", prompt(12, index), max_tokens=2)
    bench.step_until("p4")
    assert max(taken for taken, _ in bench.steps) < BOUND
    assert max(len(plan.new_requests) for _, plan in bench.steps) > 1


def test_long_contexts_take_turns_beside_a_short_one() -> None:
    bench = TimedBench(Machine(key=3e-5, pair=0.0))
    long = [f"long{i}" for i in range(6)]
    for name in long:  # the same prompt: the prefix cache holds it for all but the first
        bench.send(name, prompt(2500), max_tokens=1500)
        bench.step_until(name)
    bench.send("stream", [1, 2, 3], max_tokens=300)
    bench.step_until("stream", 10)
    bench.steps.clear()
    before = [bench.num_tokens(name) for name in long]
    bench.step_until("stream", 130)
    assert max(taken for taken, _ in bench.steps) < BOUND
    assert len({plan.rows[0].slot for _, plan in bench.steps}) > 1
    assert all(any(row.num_computed_tokens < 200 for row in plan.rows) for _, plan in bench.steps)
    gained = [bench.num_tokens(name) - some for name, some in zip(long, before, strict=True)]
    assert max(gained) - min(gained) <= 3 and min(gained) >= 30  # all have the same part


def test_long_contexts_alone_run_in_every_step() -> None:
    bench = TimedBench(Machine(key=3e-5, pair=0.0))
    for index in range(4):
        bench.send(f"long{index}", prompt(2500), max_tokens=200)
        bench.step_until(f"long{index}", 2)
    bench.steps.clear()
    bench.step_until("long3", 20)
    assert all(len(plan.rows) == 4 for _, plan in bench.steps)


def test_a_slow_model_still_computes_prompts_beside_streams() -> None:
    machine = Machine(fixed=0.5, token=0.02)
    bench = TimedBench(machine)
    bench.stream()
    bench.send("long", prompt(500), max_tokens=1)
    bench.step_until("long")
    decode = machine.fixed + machine.token
    assert max(taken for taken, _ in bench.steps[4:]) < 1.6 * decode
    assert len(bench.steps) < 90


def test_one_disturbed_step_changes_little() -> None:
    now = [0.0]
    times = StepTimes(clock=lambda: now[0])
    work = (10.0, 20.0, 5.0, 0.0, 0.0, 0.0, 0.0)

    def run(seconds: float) -> None:
        times._begun[0] = (now[0], work)
        now[0] += seconds
        times.end(0)

    for _ in range(10):
        run(0.1)
    assert times.seconds(work) == pytest.approx(0.1)
    run(30.0)
    assert times.seconds(work) < 0.13
    for _ in range(20):
        run(0.3)  # but the machine may have become slower for good
    assert times.seconds(work) == pytest.approx(0.3, rel=0.05)


GPU = Machine(fixed=0.001, token=3e-5, key=1e-8, pair=1e-9, weights=0.006)


@pytest.mark.parametrize(("limit_ms", "num_streams"), [(12.0, 1), (18.0, 40)])
def test_a_limit_of_the_user_bounds_the_steps_of_a_gpu(limit_ms: float, num_streams: int) -> None:
    bench = TimedBench(GPU, 12_000, 41, limit_ms, device="cuda", max_num_batched_tokens=8192)
    for index in range(num_streams):
        bench.send(f"stream{index}", [1, 2, 3], max_tokens=3000)
    for _ in range(20):
        bench.step()
    bench.steps.clear()
    bench.check_books = lambda: None  # type: ignore[method-assign]
    bench.send("long", prompt(11_000), max_tokens=1)
    bench.step_until("long")
    seconds = [taken for taken, _ in bench.steps]
    limit = limit_ms / 1000
    assert max(seconds) < 1.1 * limit
    assert all(len(plan.rows) == num_streams + 1 for _, plan in bench.steps[1:-2])  # none rests
    # The first chunks tell what a prompt costs; then prompts use the time that there is.
    assert min(seconds[26:-3]) > 0.75 * limit


def test_without_the_users_limit_a_gpu_computes_whole_prompts_beside_streams() -> None:
    bench = TimedBench(GPU, device="cuda", max_num_batched_tokens=8192)
    bench.stream()
    bench.send("long", prompt(3500), max_tokens=1)
    bench.step_until("long")
    assert max(row.num_tokens for _, plan in bench.steps for row in plan.rows) == 3500


def test_a_limit_below_the_decodes_own_time_still_lets_prompts_advance() -> None:
    bench = TimedBench(GPU, max_itl_ms=2.0, device="cuda", max_num_batched_tokens=8192)
    bench.stream()
    bench.send("long", prompt(400), max_tokens=1)
    bench.step_until("long")
    chunks = [row.num_tokens for _, plan in bench.steps for row in plan.rows if row.num_tokens > 1]
    assert set(chunks) == {LEAST_TOKENS} and len(chunks) == 400 // LEAST_TOKENS


def test_a_limit_of_the_user_replaces_that_of_a_cpu() -> None:
    machine = Machine(token=0.001, pair=1e-7)
    bench = TimedBench(machine, max_itl_ms=80.0)
    bench.stream()
    bench.send("long", prompt(1500), max_tokens=1)
    bench.step_until("long")
    seconds = [taken for taken, _ in bench.steps]
    assert max(seconds[10:]) < 0.088 and max(seconds) < 0.16
    assert sorted(seconds)[len(seconds) // 2] > 0.055


def test_nothing_bounds_a_prompt_on_a_gpu_while_no_request_decodes() -> None:
    bench = TimedBench(GPU, max_itl_ms=12.0, device="cuda", max_num_batched_tokens=2048)
    bench.send("long", prompt(3500), max_tokens=1)
    bench.run()
    assert [plan.rows[0].num_tokens for _, plan in bench.steps] == [2048, 1452]


def test_steps_of_a_gpu_are_not_bounded_by_time() -> None:
    assert Bench(device="cuda").scheduler._times is None
    assert Bench(chunked=False, max_num_batched_tokens=64).scheduler._times is None
    assert Bench().scheduler._times is not None
