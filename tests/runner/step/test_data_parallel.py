"""Data-parallel agreement: the decision as a table, and real processes that must never hang."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.runner.graphs.dispatch import descriptors, dispatch
from slipstream.runner.step.data_parallel import (
    NUM_ROWS,
    RankBatch,
    decide,
    encode,
)

from ...cases import some

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
GRAPHS = descriptors(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 4], (1, 2, 4, 8, 16, 32), 8, 64)
local_dispatch = functools.partial(dispatch, GRAPHS)
IDLE = (0, 0, None)


def decide_for(
    batches: list[tuple[int, int, int | None]], rank: int, graphs: bool = True
) -> object:
    table = torch.zeros(NUM_ROWS, len(batches), dtype=torch.int32)
    for index, (tokens, reqs, uniform) in enumerate(batches):
        mode = local_dispatch(tokens, reqs, uniform).mode if graphs else NONE
        table += encode(RankBatch(tokens, reqs, uniform, uniform, mode), index, len(batches))
    return decide(table.tolist(), rank, local_dispatch, idle_query_len=4)


@pytest.mark.parametrize(
    ("batches", "mode", "num_tokens", "across", "draft_reqs"),
    [
        ([IDLE, IDLE], NONE, (0, 0), (0, 0), 0),
        # uniform verify on both: the larger one decides
        ([(4, 1, 4), (12, 3, 4)], FULL, (16, 16), (16, 16), 3),
        # an idle rank joins a FULL verify and does not drag it to eager
        ([(8, 2, 4), IDLE], FULL, (8, 8), (8, 8), 2),
        ([IDLE, (2, 2, 1), IDLE], FULL, (2, 2, 2), (2, 2, 2), 2),
        # uniform here, mixed there: pieces for both
        ([(8, 2, 4), (11, 3, None)], PIECEWISE, (16, 16), (16, 16), 3),
        # two different uniform lengths fit no FULL graph
        ([(4, 1, 4), (3, 3, 1)], PIECEWISE, (4, 4), (4, 4), 3),
        # one rank's batch is over every graph: all eager, each with its own count
        ([(60, 5, None), (4, 1, 4)], NONE, (60, 4), (60, 4), 5),
        # and an idle rank still runs K + 1 rows
        ([(60, 5, None), IDLE], NONE, (60, 4), (60, 4), 5),
        ([(33, 8, None), (33, 8, None)], NONE, (33, 33), (33, 33), 8),
    ],
)
def test_decision(
    batches: list[tuple[int, int, int | None]],
    mode: CUDAGraphMode,
    num_tokens: tuple[int, ...],
    across: tuple[int, ...],
    draft_reqs: int,
) -> None:
    for rank in range(len(batches)):
        agreement = decide_for(batches, rank)
        assert agreement.has_work == any(batch[0] for batch in batches)
        assert agreement.descriptor.mode is mode
        assert agreement.descriptor.num_tokens == num_tokens[rank]
        assert agreement.num_tokens_across_dp == across
        assert agreement.num_draft_reqs == draft_reqs
        if agreement.has_work:  # without the dummies of idle ranks
            assert agreement.real_tokens == tuple(tokens for tokens, *_ in batches)
            assert agreement.real_reqs == tuple(reqs for _, reqs, _ in batches)


def test_one_eager_rank_makes_all_eager() -> None:
    agreement = decide_for([(4, 1, 4), (8, 2, 4)], 0, graphs=False)
    assert agreement.descriptor == BatchExecutionDescriptor(NONE, 4, 1, 4)
    assert agreement.num_tokens_across_dp == (4, 8)


@pytest.mark.parametrize(
    ("batches", "wants", "kept"),
    [
        # as many rows as the largest step has anyway: all keep what the first one wants
        ([(8, 2, 4), (6, 2, 3)], (3, 2), (3, 3)),
        ([(8, 2, 4), (3, 1, 3), IDLE], (3, 1, 0), (3, 3, 0)),
        ([(16, 4, 4), (2, 1, 2)], (2, 3), (2, 3)),  # 4 requests with 3 drafts would be more
        ([(16, 4, 4), (2, 1, 2)], (3, 1), (3, 3)),
        ([(8, 2, 4), (2, 2, 1)], (3, 0), (3, 0)),  # who drafts nothing has a reason
        ([(8, 2, 4), (9, 2, None)], (3, 2), (3, 2)),  # prompts: the next step may be mixed too
        ([(8, 2, 4), (8, 2, 4)], (2, 2), (2, 2)),
        ([(8, 2, 4), IDLE], (3, 0), (3, 0)),
    ],
)
def test_engines_keep_equally_many_drafts_if_no_step_grows(
    batches: list[tuple[int, int, int | None]], wants: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    size = len(batches)
    table = torch.zeros(NUM_ROWS, size, dtype=torch.int32)
    for index, (tokens, reqs, uniform) in enumerate(batches):
        batch = RankBatch(tokens, reqs, uniform, uniform, FULL, wants[index])
        table += encode(batch, index, size)
    found = [decide(table.tolist(), rank, local_dispatch, 4) for rank in range(size)]
    assert tuple(agreement.kept_drafts for agreement in found) == kept
    assert {agreement.num_drafts for agreement in found} == {max(wants)}


Ends: TypeAlias = list[tuple[int, str, str]]  # exit code, output and errors of each rank
SHORT = ((2, 250), (2, 20))


def run_ranks(folder: Path, *groups: tuple[int, int]) -> dict[tuple[int, int], Ends]:
    """The ends of groups of processes, each with a number of ranks and of steps."""
    script = Path(__file__).parents[1] / "data_parallel_rank.py"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, script, str(folder), *(f"{size}x{steps}" for size, steps in groups)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [[tuple(rank) for rank in ends] for ends in json.loads(done.stdout)]
    return dict(zip(groups, found, strict=True))


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Ends]:
    """The ends of two groups that share a process, because importing torch takes longest."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), *SHORT)


@pytest.mark.parametrize(("size", "steps"), some([(2, 1000), (3, 300), SHORT[0]], [SHORT[0]]))
def test_trap_16_ranks_run_the_same_passes_for_many_steps(
    size: int, steps: int, tmp_path: Path, short_runs: dict[tuple[int, int], Ends]
) -> None:
    group = size, steps
    ends = short_runs.get(group) or run_ranks(tmp_path, group)[group]
    assert [code for code, *_ in ends] == [0] * size, ends[0][2] + ends[-1][2]
    results = [json.loads(out.splitlines()[-1]) for _, out, _ in ends]
    assert all(result == results[0] for result in results)
    assert results[0]["exchanges"] == steps
    assert results[0]["passes"] > 1.5 * steps
    modes = results[0]["modes"]
    assert min(modes[mode.name] for mode in (NONE, PIECEWISE, FULL)) > steps / 20, modes


def test_a_rank_that_outlives_the_others_ends_with_a_sentence(
    short_runs: dict[tuple[int, int], Ends],
) -> None:
    """One exchange too many, as after a local skip: no hang, and the error names the rank."""
    (code, _, errors), _ = short_runs[SHORT[1]]
    assert code != 0
    assert "DataParallelError: data-parallel rank 0 lost contact with the other ranks" in errors
