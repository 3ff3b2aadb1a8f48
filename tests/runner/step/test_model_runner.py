"""Steps of the real runner against recomputation without any cache, with every kind of plan."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from plan_maker import PlanMaker
from tiny_target import VOCAB, Oracle, TinySetup, make_runner, tiny_llama

from slipstream.runner.step.model_runner import ModelRunner

from ...cases import some


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def oracle(model: Any) -> Oracle:
    return Oracle(model)


def drafting(oracle: Oracle, rng: random.Random, num_drafts: int) -> Callable[..., list[int]]:
    """The true continuation, spoilt at random; sometimes nothing, sometimes a -1 in the middle.

    It runs on the runner's thread, so its dice are its own.
    """
    rng = random.Random(rng.random())

    def script(slot: int, known: list[int]) -> list[int]:
        drafts = oracle.continuation(known, rng.randint(0, num_drafts))
        return [rng.choice([draft, draft, draft, rng.randrange(VOCAB), -1]) for draft in drafts]

    return script


def check_table(runner: ModelRunner, maker: PlanMaker) -> None:
    """The device rows equal the lists, once nothing is in flight."""
    table = runner.table
    for job in maker.running:
        assert job.slot is not None
        known = len(job.tokens)
        assert table.total_len[job.slot] == known
        assert table.all_token_ids[job.slot, :known].tolist() == job.tokens
        assert table.num_computed_tokens[job.slot] == job.computed
        assert table.prompt_len[job.slot] == job.prompt_len
        assert table.prefill_len[job.slot] == job.prefill_len
        assert table.num_blocks[0, job.slot] == len(job.blocks)
        assert table.block_tables[0][job.slot, : len(job.blocks)].tolist() == job.blocks
        assert not table.block_tables[0][job.slot, len(job.blocks) :].any()
        if known > job.prefill_len:
            assert table.last_sampled_tokens[job.slot] == job.tokens[-1]


@pytest.mark.parametrize(
    ("depth", "num_drafts", "padded"),  # every two of them meet
    some(
        itertools.product((1, 2), (0, 3), (False, True)),
        kept=[(1, 0, False), (1, 3, True), (2, 0, True), (2, 3, False)],
    ),
)
def test_random_plans_give_the_recomputed_text(
    model: Any, oracle: Oracle, depth: int, num_drafts: int, padded: bool
) -> None:
    rng = random.Random(f"{depth} {num_drafts} {padded}")
    setup = TinySetup(num_drafts=num_drafts, padded=padded)
    script = drafting(oracle, rng, num_drafts) if num_drafts else None
    runner = make_runner(model, setup, script)
    maker = PlanMaker(runner, oracle, rng, depth, num_drafts)
    jobs = [maker.add(rng.randint(1, 30), rng.randint(1, 25)) for _ in range(8)]
    for turn in range(1000):
        if not (maker.waiting or maker.running):
            break
        maker.step()
        if turn % 7 == 0:
            maker.drain()
            check_table(runner, maker)
    maker.drain()
    runner.shutdown()
    assert len(maker.done) == len(jobs)
    if num_drafts:
        counts = [count for job in jobs for count in job.draft_counts]
        assert max(counts) == num_drafts and min(counts) == 0
