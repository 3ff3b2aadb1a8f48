"""Decisions of the scheduler that need no state: how large one step may be."""

from __future__ import annotations

import pytest

from slipstream.configs.schema import SchedulerConfig
from slipstream.runner.kv_blocks import BlockGroup
from slipstream.runner.schedule_policy import CPU_STEP_TOKENS, step_tokens

from .scheduling import Bench, add


@pytest.mark.parametrize(
    ("config", "is_cpu", "expected"),
    [
        (SchedulerConfig(max_num_seqs=8), True, CPU_STEP_TOKENS),
        (SchedulerConfig(max_num_seqs=8), False, 2048),
        (SchedulerConfig(max_num_seqs=100), True, 500),  # all may decode with 4 drafts
        (SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), True, 64),
        (SchedulerConfig(max_num_seqs=8, enable_chunked_prefill=False), True, 2048),
    ],
)
def test_step_budget(config: SchedulerConfig, is_cpu: bool, expected: int) -> None:
    assert step_tokens(config, is_cpu, num_drafts=4) == expected


def test_a_long_prompt_leaves_gaps_for_aborts_on_a_cpu() -> None:
    bench = Bench(groups=(BlockGroup(400, 8),), max_model_len=2048, max_num_batched_tokens=2048)
    bench.engine.handle([add("long", [1 + i % 20 for i in range(1500)], max_tokens=1)])
    bench.step()
    (row,) = bench.runner.plans[0].rows
    assert row.num_tokens == CPU_STEP_TOKENS
    bench.run()
    assert bench.received["long"].finish_reason == "length"
