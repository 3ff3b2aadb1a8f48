"""What a step must not depend on, and must not touch: stale buffers, padding, other blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from plan_maker import PlanMaker, greedy
from tiny_target import BLOCK, MAX_LEN, VOCAB, Oracle, TinySetup, make_runner, tiny_llama

from slipstream.runner.batch.input_batch import InputBatch, InputBuffers
from slipstream.runner.batch.request_table import RequestTable
from slipstream.runner.scheduling.plan import NewRequest, RowResult, ScheduledRow, StepPlan
from slipstream.runner.step.model_runner import ModelRunner


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def oracle(model: Any) -> Oracle:
    return Oracle(model)


class PoisonedBuffers(InputBuffers):
    """Holds in-range garbage before every step: live blocks, huge lengths, wrong slots."""

    rng = torch.Generator().manual_seed(5)
    poisoned_steps = 0

    def gather(self, rows, query_lens, num_drafts, table: RequestTable, *rest) -> InputBatch:  # type: ignore[no-untyped-def]
        live = torch.cat([blocks[blocks > 0] for blocks in table.block_tables])
        for name, tensor in self.tensors().items():
            high = {"seq_lens": MAX_LEN, "input_ids": VOCAB, "positions": MAX_LEN}.get(name, 4)
            garbage = torch.randint(0, high, tensor.shape, generator=self.rng)
            if name in ("slot_mappings", "block_tables[0]") and len(live):
                garbage = live[torch.randint(0, len(live), tensor.shape, generator=self.rng)]
                garbage = garbage * BLOCK if name == "slot_mappings" else garbage
            tensor.copy_(garbage)
        PoisonedBuffers.poisoned_steps += 1
        return super().gather(rows, query_lens, num_drafts, table, *rest)


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_do_not_depend_on_what_buffers_held(model: Any, oracle: Oracle, depth: int) -> None:
    setup = TinySetup(num_drafts=2, padded=True, buffers=PoisonedBuffers)
    runner = make_runner(model, setup, lambda slot, known: oracle.continuation(known, 2))
    maker = PlanMaker(runner, oracle, random.Random(depth), depth, num_drafts=2)
    jobs = [maker.add(maker.rng.randint(1, 25), maker.rng.randint(1, 20)) for _ in range(8)]
    before = PoisonedBuffers.poisoned_steps
    maker.run()
    runner.shutdown()
    assert len(maker.done) == len(jobs)
    assert PoisonedBuffers.poisoned_steps - before > 10


def start(slot: int, tokens: Sequence[int], blocks: list[int]) -> NewRequest:
    return NewRequest(slot, list(tokens), len(tokens), 0, [blocks], greedy())


def run(runner: ModelRunner, plan: StepPlan) -> list[RowResult]:
    results = runner.execute(plan).get()
    runner.synchronize()
    return results


def four_prefilled(runner: ModelRunner) -> list[list[int]]:
    """Four requests of 6 tokens in slots 0..3, two blocks each; returns their tokens."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(6)] for _ in range(4)]
    plan = StepPlan(
        0,
        new_requests=[
            start(slot, prompt, [2 * slot + 1, 2 * slot + 2]) for slot, prompt in enumerate(prompts)
        ],
        rows=[ScheduledRow(slot, 6, 0, 0, False, 0) for slot in range(4)],
    )
    results = run(runner, plan)
    return [prompt + result.token_ids for prompt, result in zip(prompts, results, strict=True)]


def test_three_rows_on_four_leave_all_other_blocks_alone(model: Any) -> None:
    runner = make_runner(model, TinySetup(padded=True, buffers=PoisonedBuffers))
    four_prefilled(runner)
    caches = runner._target.cache.kv_caches
    before = {layer: cache.clone() for layer, cache in caches.items()}
    rows = [ScheduledRow(slot, 1, 0, 6, False, 1) for slot in (3, 1, 2)]
    run(runner, StepPlan(1, rows=rows))
    runner.shutdown()
    # Position 6 is the third row of each request's second block, 2 * slot + 2.
    written = {(2 * slot + 2, 2) for slot in (1, 2, 3)}
    for layer, cache in caches.items():
        changed = (cache != before[layer]).flatten(3).any(-1).any(0)  # [blocks, block_size]
        assert {tuple(at) for at in changed.nonzero().tolist()} == written


def test_prefill_and_verify_share_a_step(model: Any, oracle: Oracle) -> None:
    drafts = iter([0, 2, 3, 1, 0, 0, 0, 0, 0])  # how many of three drafts are right, per call
    right: dict[int, int] = {}

    def script(slot: int, known: list[int]) -> list[int]:
        right[slot] = count = next(drafts)
        truth = oracle.continuation(known, 3)
        return [*truth[:count], *((token + 1) % VOCAB for token in truth[count:])]

    runner = make_runner(model, TinySetup(num_drafts=3, max_num_reqs=5), script)
    known = four_prefilled(runner)
    prompt = list(range(10, 20))
    plan = StepPlan(
        1,
        new_requests=[start(4, prompt, [20, 21, 22])],
        rows=[
            *(ScheduledRow(slot, 4, 3, 6, False, 1) for slot in range(4)),
            ScheduledRow(4, 7, 0, 0, True, 0),
        ],
    )
    # Each verify row may reach position 9: a third block.
    for slot in range(4):
        plan.new_blocks.append(_block(slot, 30 + slot))
    expected = [oracle.continuation(known[slot], right[slot] + 1) for slot in range(4)]
    results = run(runner, plan)
    assert [result.token_ids for result in results] == [*expected, []]
    assert [result.num_draft_tokens for result in results] == [3, 3, 3, 3, 0]
    assert runner.table.num_computed_tokens.tolist() == [
        *(7 + len(tokens) - 1 for tokens in expected),
        7,
    ]
    assert runner.table.next_prefill_tokens[4] == prompt[7]
    assert runner.table.draft_tokens[4].tolist() == [-1, -1, -1]  # the prompt is not finished
    runner.shutdown()


def _block(slot: int, block: int):  # type: ignore[no-untyped-def]
    from slipstream.runner.scheduling.plan import NewBlocks

    return NewBlocks(slot, [[block]])


def test_a_slot_freed_and_reused_in_one_plan_starts_afresh(model: Any, oracle: Oracle) -> None:
    runner = make_runner(model, TinySetup(num_drafts=2), lambda slot, known: [1, 2])
    four_prefilled(runner)
    prompt = [7, 8, 9]
    plan = StepPlan(1, freed_slots=[2], new_requests=[start(2, prompt, [5])])
    plan.rows = [ScheduledRow(2, 3, 0, 0, False, 0)]
    results = run(runner, plan)
    assert results[0].token_ids == oracle.continuation(prompt, 1)
    table = runner.table
    assert table.all_token_ids[2].tolist()[:4] == prompt + results[0].token_ids
    assert not table.all_token_ids[2, 4:].any()
    assert table.block_tables[0][2].tolist() == [5] + [0] * (MAX_LEN // BLOCK - 1)
    runner.shutdown()
