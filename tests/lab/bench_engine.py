"""Measures the host time of one decode step, by part, with a model runner that computes nothing.

    OMP_NUM_THREADS=1 .venv/bin/python tests/lab/bench_engine.py [--requests 1 32 256]

Engine, scheduler, block pool, draft planner, request table and channel are real; only the results
of the model are invented. "step" is one iteration of the worker's loop: receive, step, send. Its
parts are measured in further rounds, with a timer around each. "table" and "gather" are the host's
part of staging a plan and of gathering its rows, without kernels. Each figure is the second
percentile over all steps, because other programs on the machine delay some of them. With --profile,
it prints instead in which functions a step spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.configs.schema import Config, SpeculativeConfig, StepLimits
from slipstream.runner.batch import input_batch
from slipstream.runner.batch.input_batch import InputBuffers
from slipstream.runner.batch.request_table import RequestTable
from slipstream.runner.batch.step_output import RowLayout, StepHandle, StepTensors
from slipstream.runner.channel import WorkerChannel
from slipstream.runner.engine.engine import Engine, join
from slipstream.runner.engine.worker import tune_garbage_collector
from slipstream.runner.messages import AddRequest, SamplingParams
from slipstream.runner.scheduling.kv_blocks import BlockGroup
from slipstream.runner.scheduling.plan import StepPlan

MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS, VOCAB_SIZE = 4096, 16, 256, 49_152
NUM_STEPS = 400
ACCEPTANCE = 0.6  # probability of each draft, given that the drafts before it were accepted
clock = time.perf_counter


class ReadyRunner:
    """A model runner that returns random results at once."""

    def __init__(self, num_drafts: int) -> None:
        self.facts = SimpleNamespace(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            kv_groups=(BlockGroup(MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1, BLOCK_SIZE),),
            eos_token_ids=(0,),
            device="cuda:0",
            dtype="none",
            attention_backend="fake",
            needs=SimpleNamespace(
                num_speculative_tokens=num_drafts,
                num_lookahead_tokens=num_drafts,
                kv_needs_next_token=False,
                max_deferred_tokens=5 if num_drafts else 0,
                per_request_drafts=False,
                watched=True,
            ),
            limits=StepLimits(MAX_NUM_SEQS, 8192),
            startup_seconds={},
            lowered_claims=(),
            step_seconds={},
        )
        self.plans: list[StepPlan] = []
        self.keeps_plans = False
        self._random = np.random.default_rng(0)

    def execute(self, plan: StepPlan) -> StepHandle:
        if self.keeps_plans:
            self.plans.append(plan)
        handle = StepHandle()
        handle.publish(self._tensors(plan), RowLayout([None] * len(plan.rows)), None)
        return handle

    def _tensors(self, plan: StepPlan) -> StepTensors:
        drafts = np.array([row.num_draft_tokens for row in plan.rows], dtype=np.int32)
        samples = np.array([not row.is_prefill for row in plan.rows])
        width = int(drafts.max()) + 1
        hits = self._random.random((len(drafts), width)) < ACCEPTANCE
        accepted = np.minimum(np.cumprod(hits, axis=1).sum(1), drafts)
        counts = np.where(samples, accepted + 1, 0).astype(np.int32)
        tokens = self._random.integers(1, VOCAB_SIZE, (len(drafts), width))
        return StepTensors(
            sampled_token_ids=torch.from_numpy(tokens),
            num_sampled=torch.from_numpy(counts),
            num_draft_tokens=torch.from_numpy(drafts),
            has_nan=torch.zeros(len(drafts), dtype=torch.bool),
            logprobs=None,
        )


class Bench:
    """An engine with `num_reqs` decoding requests, and the worker's loop."""

    def __init__(self, num_reqs: int, num_drafts: int, auto: bool) -> None:
        self.num_reqs, self.num_drafts = num_reqs, num_drafts
        self.runner = ReadyRunner(num_drafts)
        spec = SpeculativeConfig(method="off")
        if num_drafts:
            fixed = None if auto else num_drafts
            spec = SpeculativeConfig("eagle3", None, fixed, max_speculative_tokens=num_drafts)
        self.engine: Engine = join(self.runner, Config(speculative=spec))  # type: ignore[arg-type]
        folder = tempfile.mkdtemp(prefix="slipstream-bench-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._server = self._context.socket(zmq.PAIR)
        self._server.bind(f"ipc://{folder}/worker")
        self.channel = WorkerChannel(f"ipc://{folder}/worker")

    def add_requests(self) -> None:
        """Start the requests and compute their prompts.

        The prompts differ in length, so that not all blocks are filled in the same step."""
        for index in range(self.num_reqs):
            sampling = SamplingParams(seed=index, max_tokens=4000, stop_token_ids=[0])
            prompt = [(index * 7 + i) % VOCAB_SIZE for i in range(24 + index % BLOCK_SIZE)]
            self.engine.handle([AddRequest(f"cmpl-{index:032x}", prompt, sampling)])
        for _ in range(16):  # prefill, and the first decodes
            self.engine.step()

    def iterate(self) -> None:
        """Run one iteration of the worker's loop."""
        messages = self.channel.receive(0.0)
        if messages:
            self.engine.handle(messages)
        outputs = self.engine.step(self.channel.has_messages)
        if outputs:
            self.channel.send([*outputs])

    def drain(self) -> None:
        """Receive the messages that were sent, as the server would."""
        while self._server.poll(0):
            self._server.recv()

    def close(self) -> None:
        self.engine.shutdown = lambda: None  # type: ignore[method-assign]
        self._server.close(0)
        self.channel.close()
        self._context.term()


class Timers:
    """Measures the seconds spent in wrapped methods, including their callees."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, part: str) -> None:
        if not hasattr(owner, name):
            return
        method = getattr(owner, name)
        self.seconds.setdefault(part, 0.0)

        def timed(*args: Any) -> Any:
            start = clock()
            try:
                return method(*args)
            finally:
                self.seconds[part] += clock() - start

        setattr(owner, name, timed)


class Samples:
    """The seconds of every step, by part."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def add(self, seconds: dict[str, float]) -> None:
        """Add the seconds of one step."""
        for part, spent in seconds.items():
            self._found.setdefault(part, []).append(spent)

    def low(self) -> dict[str, float]:
        """The second percentile of each part, in microseconds."""
        return {
            part: 1e6 * sorted(seconds)[len(seconds) // 50] for part, seconds in self._found.items()
        }


def typical(bench: Bench, timers: Timers) -> dict[str, float]:
    """Run NUM_STEPS steps; returns microseconds per step by part, without disturbed steps."""
    samples = Samples()
    for _ in range(NUM_STEPS):
        timers.seconds = dict.fromkeys(timers.seconds, 0.0)
        start = clock()
        bench.iterate()
        spent = clock() - start
        # exclude the time for inventing results
        samples.add(dict(timers.seconds, step=spent - timers.seconds["runner"]))
        bench.drain()
    return samples.low()


def measure(num_reqs: int, num_drafts: int, auto: bool) -> dict[str, float]:
    """Measure the microseconds of a step and of its parts."""
    bench = Bench(num_reqs, num_drafts, auto)
    bench.add_requests()
    tune_garbage_collector()
    timers = Timers()
    timers.wrap(bench.runner, "execute", "runner")
    best = typical(bench, timers)
    engine: Any = bench.engine
    timers.wrap(engine._scheduler, "schedule", "schedule")
    timers.wrap(engine._scheduler, "apply", "apply")
    if engine.drafts is not None:
        timers.wrap(engine.drafts, "complete", "planner")
        timers.wrap(engine.drafts, "land", "planner")
        timers.wrap(engine.drafts, "tell", "planner")
    timers.wrap(StepHandle, "get", "results")
    timers.wrap(bench.channel, "send", "send")
    get = StepHandle.get
    parts = typical(bench, timers)
    best |= {part: us for part, us in parts.items() if part not in ("step", "runner")}
    StepHandle.get = get.__closure__[0].cell_contents  # type: ignore[index,method-assign]
    best |= tables(bench)
    bench.close()
    return best


def tables(bench: Bench) -> dict[str, float]:
    """Measure the host's part of staging plans and of gathering their rows, in microseconds."""
    runner = bench.runner
    runner.keeps_plans = True
    for _ in range(NUM_STEPS):
        bench.iterate()
        bench.drain()
    device = torch.device("cpu")
    max_blocks = [MAX_MODEL_LEN // BLOCK_SIZE]
    table = RequestTable(
        MAX_NUM_SEQS, MAX_MODEL_LEN, VOCAB_SIZE, bench.num_drafts, max_blocks, device
    )
    buffers = InputBuffers(
        MAX_NUM_SEQS, 8192, MAX_MODEL_LEN, bench.num_drafts, [BLOCK_SIZE], max_blocks, device
    )
    vars(input_batch)["prepare_inputs"] = lambda *args: None
    buffers._gather_blocks = lambda *args: None  # type: ignore[method-assign]
    samples = Samples()
    with torch.inference_mode():
        for plan in runner.plans:
            start = clock()
            table.stage(plan)
            table.apply_staged()
            middle = clock()
            gather(buffers, table, plan)
            samples.add({"table": middle - start, "gather": clock() - middle})
    return samples.low()


def gather(buffers: InputBuffers, table: RequestTable, plan: StepPlan) -> None:
    """Gather the rows of a plan as the model runner does."""
    query_lens = [row.num_tokens for row in plan.rows]
    num_drafts = [row.num_draft_tokens for row in plan.rows]
    uniform = query_lens[0] if len(set(query_lens)) == 1 else None
    descriptor = BatchExecutionDescriptor(
        CUDAGraphMode.FULL, sum(query_lens), len(query_lens), uniform
    )
    buffers.gather(plan.rows, query_lens, num_drafts, table, descriptor, uniform)


def profile(num_reqs: int, num_drafts: int, auto: bool) -> None:
    """Print the functions in which steps spend most time."""
    bench = Bench(num_reqs, num_drafts, auto)
    bench.add_requests()
    profiler = cProfile.Profile()
    for _ in range(200):
        profiler.enable()
        bench.iterate()
        profiler.disable()
        bench.drain()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
    bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument(
        "--auto", action="store_true", help="choose K automatically, up to --drafts"
    )
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    columns = (
        "step", "schedule", "planner", "results", "apply", "send", "table", "gather"
    )  # fmt: skip
    print("microseconds per step; in brackets, per batch row\n")
    print("| requests | K | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for num_drafts in args.drafts:
        for num_reqs in args.requests:
            if args.profile:
                profile(num_reqs, num_drafts, args.auto)
                continue
            best = measure(num_reqs, num_drafts, args.auto)
            gc.unfreeze()
            cells = [f"{best.get(c, 0):.0f} ({best.get(c, 0) / num_reqs:.1f})" for c in columns]
            print(f"| {num_reqs} | {num_drafts} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
