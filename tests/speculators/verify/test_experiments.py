"""In a real engine: few drafts of a random head are accepted, and the cause is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.runner.messages import SamplingParams
from slipstream.server.drafters.acceptance import Tally
from slipstream.server.verify.diagnosis.causes import HeadFiles, read_head
from slipstream.server.verify.diagnosis.experiments import (
    Patient,
    diagnose,
    long_prompts,
    present_boundaries,
    try_boundaries,
)
from slipstream.server.verify.plan import Subject
from slipstream.server.verify.replies import generate
from slipstream.server.verify.report import Report

from .in_process import V, save_pair, start

PROMPTS = [[n, n + 5, (7 * n) % V, 3] for n in range(1, 5)]


def test_a_head_that_was_never_trained_is_named(tmp_path: Path) -> None:
    target, head = save_pair(tmp_path)
    engine = start(target, "eagle3", head)
    subject = Subject(PROMPTS, [], V, "float32", "eagle3", True, plain_prompts=PROMPTS[:2])
    patient = Patient("eagle3", read_head(head), {"num_hidden_layers": 2}, (), "int4", 128)
    report = Report({})

    async def checks() -> bool:
        sampling = SamplingParams(0, 24, temperature=0.0)
        replies = await generate(engine, PROMPTS, sampling, drafts=True)
        return await diagnose(engine, subject, patient, replies, report)

    assert asyncio.run(checks())
    engine.tiny.close()
    causes = {check.name for check in report.checks}
    assert {"Weights", "Precision"} <= causes and "Chat template" not in causes, report.table()
    assert "looks randomly initialised" in report.table()


def test_better_auxiliary_layers_are_found_by_trying() -> None:
    patient = Patient("eagle3", HeadFiles({}), {"num_hidden_layers": 16}, (1, 7, 12))
    asked = []

    async def measure(boundaries: tuple[int, ...]) -> Tally:
        asked.append(boundaries)
        hits = 150 if boundaries == (2, 8, 13) else 20
        return Tally(drafted=[200], accepted=[hits])

    report = Report({})
    now = Tally(drafted=[200], accepted=[25])
    asyncio.run(try_boundaries(patient, now, measure, report))
    assert (2, 8, 13) in asked and (1, 7, 12) not in asked
    assert "with aux_hidden_state_boundaries [2, 8, 13], 75 %" in report.checks[0].summary


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 8, 13)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 8, 13]}, (2, 8, 13)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 7, 12]}, (2, 8, 13)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 7, 12],
                "transformer_layer_config": {},
            },
            (1, 7, 12),
        ),
    ],
)
def test_the_present_boundaries_are_those_that_the_engine_reads(
    config: dict[str, object], expected: tuple[int, ...]
) -> None:
    patient = Patient("eagle3", HeadFiles(config), {"num_hidden_layers": 16})
    assert present_boundaries(patient) == expected
    from slipstream.runner.draft_models.draft_config import choose_boundaries

    nested = "transformer_layer_config" in config
    assert choose_boundaries(config, nested, 16) == expected


def test_long_prompts_fill_the_context() -> None:
    found = long_prompts([[1] * 10, [2] * 10], 133)
    assert [len(text) for text in found] == [100, 100]
    assert found[0][-10:] == [1] * 10 and found[1][-10:] == [2] * 10
    assert long_prompts([[1] * 60], 133) == [] and long_prompts([], 133) == []
