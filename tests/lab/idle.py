"""Prints how long the GPU is idle in a decode step, between which kernels, and its busy times.

    PYTHONPATH=.src python tests/lab/idle.py MODEL BATCH [BATCH ...] [-sc JSON] [-tp N] [--top N]

MODEL is a folder from `shapes.py`; the weights are random. With -tp N, N GPUs share the model, and
the profile is the first one's. Steps are timed without and with the
profiler. The GPU is idle while no kernel or copy runs, in the middle three fifths of the profile.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.runner.engine.engine import Engine, build_engine
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams

PROMPT, STEPS = 128, 40


@dataclass
class Timeline:
    """The GPU events of a profile, ordered by their start, in microseconds."""

    events: list[tuple[float, float, str]]  # start, end, name
    idle: float = 0.0
    span: float = 0.0
    gaps: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)

    def measure(self) -> None:
        """Drop the first and last fifth, then sum idle and busy time."""
        first, last = self.events[0][0], max(end for _, end, _ in self.events)
        fifth = (last - first) / 5
        self.events = [e for e in self.events if e[0] >= first + fifth and e[1] <= last - fifth]
        begin: float = self.events[0][0]
        covered = begin
        before = ""
        for start, end, name in self.events:
            if start > covered:
                self.idle += start - covered
                self.gaps[f"{before[:38]} -> {name[:38]}"] += round(start - covered)
            if end > covered:
                covered, before = end, name
            self.busy[name[:60]] += round(end - start)
        self.span = covered - begin


def timeline_of(seen: profile) -> Timeline:
    """The measured timeline of a profile's GPU events."""
    device = torch._C._autograd.DeviceType.CUDA
    events = [
        (float(event.time_range.start), float(event.time_range.end), event.name)
        for event in seen.events()
        if event.device_type == device
    ]
    line = Timeline(sorted(events))
    line.measure()
    return line


def decode(engine: Engine, steps: int) -> float:
    """Run `steps` steps that have outputs; returns the milliseconds per step."""
    began, done = time.perf_counter(), 0
    while done < steps:
        done += sum(bool(step.outputs) for step in engine.step())
    return 1e3 * (time.perf_counter() - began) / steps


def trace(engine: Engine, batch: int, top: int) -> None:
    """Profile one batch size; print the `top` longest entries of each table."""
    draw, most = random.Random(batch), engine.ready.vocab_size - 10
    ids = [f"{batch}-{i}" for i in range(batch)]
    engine.handle(
        [
            AddRequest(
                name,
                [draw.randrange(10, most) for _ in range(PROMPT)],
                SamplingParams(seed=i, max_tokens=1000, temperature=0.0),
            )
            for i, name in enumerate(ids)
        ]
    )
    decode(engine, 30)
    plain = decode(engine, 60)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        traced = decode(engine, STEPS)
        torch.cuda.synchronize()
    line = timeline_of(seen)
    steps = line.span / 1e3 / traced
    print(
        f"batch {batch}: {plain:.3f} ms per step, {traced:.3f} with the profiler, of which the GPU "
        f"is idle {line.idle / line.span:.2%} ({line.idle / steps:.0f} us); "
        f"{len(line.events) / steps:.0f} kernels and copies per step"
    )
    for title, table in (("idle before", line.gaps), ("busy", line.busy)):
        for name, spent in table.most_common(top):
            print(f"  {title} {spent / steps:8.1f} us  {name}")
    engine.handle([AbortRequests(ids)])
    while engine.has_work():
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("batches", type=int, nargs="+")
    parser.add_argument("-sc", default="{}")
    parser.add_argument("-tp", type=int, default=1)
    parser.add_argument("--top", type=int, default=12, help="lines of each table")
    arguments = parser.parse_args()
    given = json.loads(arguments.sc)
    speculative: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    config = Config(
        model=ModelConfig(model=arguments.model, load_format="dummy", max_model_len=4096),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        cache=CacheConfig(gpu_memory_utilization=0.7, enable_prefix_caching=False),
        speculative=SpeculativeConfig(**speculative),
        parallel=ParallelConfig(tensor_parallel_size=arguments.tp),
    )
    engine = build_engine(config, lambda _: None)
    for batch in arguments.batches:
        trace(engine, batch, arguments.top)
    engine.shutdown()


if __name__ == "__main__":
    main()
