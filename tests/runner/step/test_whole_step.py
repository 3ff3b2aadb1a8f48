"""Steps whose graphs gather rows, choose tokens and commit them give what plain steps give."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_maker import PlanMaker
from tiny_target import VOCAB, Oracle, TinySetup, make_runner, tiny_llama

from slipstream.configs.graphs import CUDAGraphMode
from slipstream.runner.batch.host_copy import StagingPool
from slipstream.runner.graphs.manager import CudaGraphManager
from slipstream.runner.messages import SamplingParams
from slipstream.runner.scheduling.plan import NewRequest, ScheduledRow, StepPlan
from slipstream.runner.step.model_runner import ModelRunner
from slipstream.runner.step.token_graphs import TokenGraphs

from ..graphs.recorder import RecordedGraphs

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.cases import some  # noqa: E402
from tests.speculators.recorded_graphs import TensorBackend  # noqa: E402

Script = Callable[[int, list[int]], list[int]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def oracle(model: Any) -> Oracle:
    return Oracle(model)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each manager replayed a graph."""
    counts: Counter[str] = Counter()
    replay = CudaGraphManager.run_fullgraph

    def counted(self: CudaGraphManager, *args: Any) -> None:
        counts[self.name] += 1
        replay(self, *args)

    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", counted)
    return counts


def runner_for(
    model: Any,
    num_drafts: int = 0,
    script: Script | None = None,
    whole: bool = True,
    **changes: Any,
) -> ModelRunner:
    setup = TinySetup(
        num_drafts=num_drafts, mode=CUDAGraphMode.FULL_DECODE_ONLY, whole=whole, compare=False,
        recorded=RecordedGraphs(), attention=TensorBackend(),
    )  # fmt: skip
    runner = make_runner(model, setup, script)
    runner.capture()
    return runner


class LateReader(PlanMaker):
    """Reads a step's results when all that was launched after it has run."""

    def _land(self, flight: Any) -> None:
        self.runner.synchronize()
        super()._land(flight)


def scripted(oracle: Oracle, rng: random.Random, num_drafts: int) -> Script | None:
    """Drafts that are mostly right, some wrong, some missing."""

    def script(slot: int, known: list[int]) -> list[int]:
        drafts = oracle.continuation(known, rng.randint(0, num_drafts))
        return [rng.choice([draft, draft, draft, rng.randrange(VOCAB), -1]) for draft in drafts]

    return script if num_drafts else None


@pytest.mark.parametrize(
    ("depth", "num_drafts"), some(itertools.product((1, 2), (0, 3)), kept=[(1, 0), (2, 3)])
)
def test_random_plans_give_the_recomputed_text(
    model: Any, oracle: Oracle, depth: int, num_drafts: int, replays: Counter[str]
) -> None:
    """Batches grow and shrink, rows change slots, are preempted and come back."""
    rng = random.Random(f"{depth} {num_drafts}")
    runner = runner_for(model, num_drafts, scripted(oracle, rng, num_drafts))
    maker = LateReader(runner, oracle, rng, depth, num_drafts)
    jobs = [maker.add(rng.randint(1, 30), rng.randint(1, 25)) for _ in range(8)]
    maker.run()
    runner.shutdown()
    assert len(maker.done) == len(jobs)
    assert replays["target"] >= replays["token selection"] > 3


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "has_own_seed": True},
    {"temperature": 1.2, "seed": 6},  # with drafts: judged by the logits
    {"temperature": 0.7, "seed": 7, "has_own_seed": True, "top_p": 0.8},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.9},
]


@pytest.mark.parametrize("num_drafts", some([0, 2], [2]))
def test_every_option_gives_the_text_of_plain_steps_there_and_back(
    model: Any, oracle: Oracle, num_drafts: int, replays: Counter[str]
) -> None:
    texts = []
    for whole in (False, True):
        replays.clear()
        rng = random.Random(num_drafts)
        script = scripted(oracle, random.Random(3), num_drafts)
        runner = runner_for(model, num_drafts, script, whole)
        maker = LateReader(runner, None, rng, 2, num_drafts)
        jobs = [
            maker.add(rng.randint(1, 9), rng.randint(4, 20), **(OPTIONS[0] | option))
            for option in (*OPTIONS[:2], *OPTIONS, *OPTIONS[:2])
        ]
        maker.run()
        runner.shutdown()
        texts.append([job.tokens for job in jobs])
        assert (replays["token selection"] > 3) == whole
        assert bool(replays["draft rejection"]) == (whole and num_drafts > 0)
        assert replays["target"] > replays["token selection"] + replays["draft rejection"] + 3
    assert texts[0] == texts[1]


def decode(step: int, slots: list[int], at: int, drafts: int = 0) -> StepPlan:
    rows = [ScheduledRow(slot, drafts + 1, drafts, at, False, 1) for slot in slots]
    return StepPlan(step, rows=rows)


def started(runner: ModelRunner, slots: list[int], **options: Any) -> None:
    """Each slot gets a prompt of 3 and one token."""
    plan = StepPlan(0)
    for slot in slots:
        sampling = SamplingParams(**({"seed": 3, "max_tokens": 20, "temperature": 0.0} | options))
        blocks = [list(range(1 + 9 * slot, 9 + 9 * slot))]
        plan.new_requests.append(NewRequest(slot, [slot, 2, 3], 3, 0, blocks, sampling))
        plan.rows.append(ScheduledRow(slot, 3, 0, 0, False, 0))
    runner.execute(plan).get()


def test_a_steady_batch_costs_the_host_two_replays_and_nothing_else(
    model: Any, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_for(model)
    started(runner, [2, 0])
    uploads = 0
    upload = StagingPool.upload

    def counted(self: StagingPool, *args: Any, **kwargs: Any) -> Any:
        nonlocal uploads
        uploads += 1
        return upload(self, *args, **kwargs)

    monkeypatch.setattr(StagingPool, "upload", counted)
    replays.clear()
    for step in range(1, 7):
        slots = [2, 0] if step < 4 else [0]  # one is aborted
        runner.execute(decode(step, slots, 2 + step)).get()
    assert uploads == 2  # who is in the batch, when that changes
    assert replays == {"target": 6, "token selection": 6}
    runner.shutdown()


def test_results_are_one_tensor_for_the_host(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_for(model)
    started(runner, [1])
    sent: list[list[Any]] = []
    run = TokenGraphs.run

    def seen(self: Any, graphs: Any, batch: Any, handle: Any, stream: Any) -> Any:
        result = run(self, graphs, batch, handle, stream)
        sent.append(handle._output.result()[0].all())
        return result

    monkeypatch.setattr(TokenGraphs, "run", seen)
    handle = runner.execute(decode(1, [1], 3))
    (result,) = handle.get()
    runner.synchronize()
    assert [len(tensors) for tensors in sent] == [1] and sent[0][0].dtype == torch.int64
    assert len(result.token_ids) == 1 and result.has_nan is False
    runner.shutdown()


def test_nan_in_a_row_is_told_of_that_row_alone(model: Any) -> None:
    runner = runner_for(model)
    started(runner, [0, 1])
    cache = next(iter(runner._target.cache.kv_caches.values()))
    block = int(runner.table.block_tables[0][1, 0])
    cache[:, block] = float("nan")
    results = runner.execute(decode(1, [0, 1], 3)).get()
    assert [result.has_nan for result in results] == [False, True]
    runner.shutdown()


def test_what_asks_for_more_than_tokens_chooses_without_a_graph(
    model: Any, replays: Counter[str]
) -> None:
    runner = runner_for(model, 2, lambda slot, known: [1, 2])
    cases: list[tuple[dict[str, Any], int, str | None]] = [
        ({}, 2, "token selection"),
        ({"temperature": 0.5, "has_own_seed": True}, 2, "token selection"),
        ({"temperature": 0.5}, 0, "token selection"),
        ({"temperature": 0.5}, 2, "draft rejection"),
        ({"min_p": 0.1, "temperature": 0.5}, 0, None),
        ({"top_p": 0.9, "temperature": 0.5}, 2, None),
        ({"logprobs": 0}, 0, None),
        ({"prompt_logprobs": 0}, 0, "token selection"),  # its prompt is behind it
    ]
    for options, drafts, name in cases:
        started(runner, [0], **options)
        replays.clear()
        runner.execute(decode(1, [0], 3, drafts)).get()
        runner.synchronize()
        assert replays == {"target": 1} | ({name: 1} if name else {}), options
    runner.shutdown()


def test_a_prompt_that_ends_in_as_many_tokens_as_a_verify_step_has(
    model: Any, oracle: Oracle, replays: Counter[str]
) -> None:
    """The batch is uniform, but its rows emit from their last token alone."""
    runner = runner_for(model, 2, lambda slot, known: [])
    started(runner, [3])
    assert replays == {"target": 1}
    (result,) = runner.execute(decode(1, [3], 3, 2)).get()
    text = oracle.continuation([3, 2, 3], 2)
    assert result.token_ids == text[1:]
    runner.shutdown()


def test_a_request_that_reports_its_drafts_keeps_the_graph(
    model: Any, oracle: Oracle, replays: Counter[str]
) -> None:
    runner = runner_for(model, 2, lambda slot, known: [7, 8])
    started(runner, [1], report_drafts=True)
    replays.clear()
    (result,) = runner.execute(decode(1, [1], 3, 2)).get()
    assert result.draft_token_ids == [7, 8] and replays["target"] == 1 and len(replays) > 1
    assert result.token_ids == oracle.continuation([1, 2, 3], 2)[1:]
    runner.shutdown()


def test_drafts_that_the_host_must_see_are_there_before_the_graph(
    model: Any, oracle: Oracle
) -> None:
    runner = runner_for(model, 2, lambda slot, known: [7, 8])
    started(runner, [1])
    plan = decode(1, [1], 3, 2)
    plan.needs_draft_ids = True
    runner.forward(plan)
    assert runner.take_draft_token_ids(plan) == [[7, 8]]
    (result,) = runner.sample(plan).get()
    assert result.token_ids == oracle.continuation([1, 2, 3], 2)[1:]
    assert result.num_draft_tokens == 2
    runner.shutdown()
