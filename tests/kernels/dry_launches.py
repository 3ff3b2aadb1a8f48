"""Prints what a start on an H100 would compile, and what steps of other sizes would add to it.

Run by `test_compile_ahead.py` in a process of its own, since Triton decides at import time between
compiling and interpreting. Nothing is compiled: kinds of launches are counted. `dry_launches.py
MODEL [DRAFTER]`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import torch
from triton.runtime import driver

from slipstream.configs.schema import Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from slipstream.kernels.compile_ahead import compiling_only, without_driver
from slipstream.kernels.device import Card, pretend_card
from slipstream.runner import dry_start
from slipstream.runner.messages import SamplingParams
from slipstream.runner.plan import NewRequest, ScheduledRow, StepPlan

H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 132)
PROMPTS = ([1], [2], [3, 1], [7], [16], [33, 1, 1], [100], [17, 40, 5], [250], [65] * 3, [129, 1])
KINDS = (
    SamplingParams(seed=0, max_tokens=8, temperature=0.0),
    SamplingParams(seed=1, max_tokens=8, has_own_seed=True),
    SamplingParams(seed=2, max_tokens=8, top_p=0.5, top_k=3),
)


class Counting(Executor):
    """Says that everything was compiled."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(True)
        return future


def serve(runner: Any, prompts: list[int], params: SamplingParams, step_id: int) -> None:
    """A prefill of each of these lengths in one batch, and three decodes."""
    drafts: int = runner.facts.needs.num_speculative_tokens
    new = [
        NewRequest(slot, [0] * length, length, 0, [list(range(1, 40))], params)
        for slot, length in enumerate(prompts)
    ]
    rows = [ScheduledRow(slot, length, 0, 0, False, 0) for slot, length in enumerate(prompts)]
    runner.execute(StepPlan(step_id, new_requests=new, rows=rows)).get()
    for step in range(3):
        rows = [
            ScheduledRow(slot, drafts + 1, drafts, length + step, False, step + 1)
            for slot, length in enumerate(prompts)
        ]
        runner.execute(StepPlan(step_id + 1 + step, rows=rows)).get()
    runner.execute(StepPlan(step_id + 4, freed_slots=list(range(len(prompts))))).get()


def main(model: str, drafter: str | None) -> None:
    """One line of JSON: kinds of launches of the start, and kernels that came after it."""
    speculative = SpeculativeConfig()
    if drafter is not None:
        speculative = SpeculativeConfig(
            method="eagle3", model=drafter, num_speculative_tokens=3, load_format="dummy"
        )
    config = Config(
        model=ModelConfig(model=model, load_format="dummy", device="cuda"),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
        speculative=speculative,
    )
    pretend_card(H100)
    driver.set_active(without_driver(H100))
    with compiling_only(Counting()) as kernels:
        runner = dry_start.dry_start(config)
        started = set(kernels)
        with torch.inference_mode():
            for index, prompts in enumerate(PROMPTS):
                for kind, params in enumerate(KINDS):
                    serve(runner, prompts, params, 1 + 100 * index + 10 * kind)
        later = [name(key) for key in kernels if key not in started]
    print(json.dumps({"started": len(started), "later": later}))


def name(key: Any) -> str:
    """Of the kernel, where the key has it."""
    return str(key)[:400]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
