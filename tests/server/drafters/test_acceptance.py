"""`slipstream bench acceptance`: what it counts, prints and rejects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.runner.messages import AddRequest, Progress, Ready, RequestOutput
from slipstream.server.bench import acceptance_command
from slipstream.server.commands import main
from slipstream.server.drafters.acceptance import (
    MeasuredPrompt,
    MeasurementFailed,
    Tally,
    measure_acceptance,
    table,
    total,
)

from ..api_fakes import ScriptedEngine

PROMPTS = [MeasuredPrompt((1, 2), "a"), MeasuredPrompt((3,), "b"), MeasuredPrompt((4,), "a")]


def steps(request: AddRequest, *drafts: tuple[int, int]) -> list[RequestOutput]:
    """A token without drafts, then steps of (drafted, accepted), then the end."""
    outputs = [RequestOutput(request.request_id, [9])]
    for drafted, accepted in drafts:
        output = RequestOutput(request.request_id, [9] * (accepted + 1))
        output.num_draft_tokens, output.num_accepted_tokens = drafted, accepted
        outputs.append(output)
    outputs[-1].finish_reason = "length"
    return outputs


async def test_counts_by_position_and_domain() -> None:
    engine = ScriptedEngine(
        lambda request: (
            [*steps(request, (3, 3), (3, 1))]
            if request.prompt_token_ids[0] == 1
            else [*steps(request, (3, 0), (2, 2), (0, 0))]
        )
    )
    done: list[int] = []
    tallies = await measure_acceptance(
        engine, PROMPTS, 0.7, 64, [2, 5], concurrency=2, on_reply=lambda: done.append(1)
    )
    assert len(done) == 3
    assert tallies["b"] == Tally(2, 6, [2, 2, 1], [1, 1, 0])
    assert tallies["a"] == Tally(4, 13, [4, 4, 3], [3, 2, 1])
    whole = total(tallies)
    assert whole.acceptance == [4 / 6, 3 / 6, 1 / 4]
    assert whole.mean_length == 1 + 8 / 6
    sampling = {r.prompt_token_ids[0]: r.sampling for r in engine.requests}
    assert [sampling[i].seed for i in (1, 3, 4)] == [0, 1, 2]
    assert sampling[1].temperature == 0.7 and sampling[1].max_tokens == 64
    assert sampling[1].stop_token_ids == [2, 5]
    lines = table(tallies, 4).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["a", "b", "all"]
    assert "2.33" in lines[3] and "66.7%" in lines[3] and "0.0%" in lines[3]


async def test_without_drafts_a_step_is_one_token() -> None:
    engine = ScriptedEngine(lambda request: [*steps(request)])
    tallies = await measure_acceptance(engine, PROMPTS, 0.0, 8, [])
    assert total(tallies).mean_length == 1.0 and total(tallies).acceptance == []


async def test_a_failed_reply_ends_the_measurement() -> None:
    def fail(request: AddRequest) -> list[RequestOutput | Exception | float]:
        output = RequestOutput(request.request_id, [], finish_reason="error", error="It broke.")
        return [output if request.prompt_token_ids[0] == 3 else 0.01, *steps(request)]

    with pytest.raises(MeasurementFailed, match="prompt 2 failed: It broke"):
        await measure_acceptance(ScriptedEngine(fail), PROMPTS, 0.0, 8, [])


@pytest.mark.parametrize("failing", [False, True])
async def test_no_reply_continues_after_the_measurement(failing: bool) -> None:
    def stall(request: AddRequest) -> list[RequestOutput | Exception | float]:
        output = RequestOutput(request.request_id, [], finish_reason="error", error="It broke.")
        fails = failing and request.prompt_token_ids[0] == 3
        return [0.05, output] if fails else [float("inf")]

    engine = ScriptedEngine(stall)
    task = asyncio.create_task(measure_acceptance(engine, PROMPTS, 0.0, 8, []))
    while len(engine.open) < len(PROMPTS):
        await asyncio.sleep(0.005)
    if not failing:
        task.cancel()
    with pytest.raises(MeasurementFailed if failing else asyncio.CancelledError):
        await task
    assert not engine.open and len(engine.aborted) == len(PROMPTS) - failing


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--temperatures", "0,hot"], "--temperatures"),
        (["--temperatures", "3"], "--temperatures"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens"),
        (["--method", "eagle9"], "method"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--output", "/nowhere/x.json"], "--output /nowhere/x.json: its folder does not exist"),
        (["--json", "/"], "--output /: it must be a file, but is a folder"),
    ],
)
def test_wrong_flags_are_one_sentence(
    flags: list[str], what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["bench", "acceptance", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slipstream bench: error: ") and what in error
    assert error.count("\n") == 1


class StartedEngine(ScriptedEngine):
    """An engine client that reports progress when it starts."""

    def __init__(self, config: object) -> None:
        super().__init__(lambda request: [*steps(request, (3, 2))])

    async def start(self, progress: Callable[[Progress], None]) -> Ready:
        progress(Progress("load", 0, 1))
        return self.ready

    async def shutdown(self) -> None:
        """Nothing runs."""


def use(monkeypatch: pytest.MonkeyPatch, drafter: Path) -> None:
    """Measure the started engine, with `drafter` as its folder."""

    def prompts(*_: Any) -> tuple[list[MeasuredPrompt], set[int]]:
        return PROMPTS, {2}

    monkeypatch.setattr("slipstream.server.engine.engine_client.EngineClient", StartedEngine)
    monkeypatch.setattr(acceptance_command, "prompts_to_measure", prompts)
    (drafter / "config.json").write_text("{}")


@pytest.mark.parametrize("flag", ["--output", "--json"])
def test_figures_are_written_as_by_the_other_benchmarks(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, tmp_path)
    file = tmp_path / "figures.json"
    command = ["bench", "acceptance", str(tmp_path), "--temperatures", "0", flag]
    assert main([*command, str(file)]) == 0
    table = capsys.readouterr().out
    assert main([*command, "-"]) == 0
    shown = capsys.readouterr()
    assert table and table in shown.err  # tables go to standard error
    figures = json.loads(shown.out)
    assert figures == json.loads(file.read_text()) and figures["kind"] == "acceptance"
    assert figures["model"] == "smollm2-135m" and figures["drafter"] == str(tmp_path)
    assert set(figures["runs"][0]["domains"]) == {"a", "b"}
    assert main(["bench", "compare", str(file), str(file)]) == 0
    compared = capsys.readouterr().out
    assert "domain a" in compared and "mean_acceptance_length" in compared


def test_figures_that_cannot_be_written_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, tmp_path)
    command = ["bench", "acceptance", str(tmp_path), "--temperatures", "0", "--output"]
    assert main([*command, "/dev/full"]) == 2
    shown = capsys.readouterr()
    assert "--output /dev/full: no space left on device" in shown.err
    assert json.loads(shown.out[shown.out.index("{") :])["kind"] == "acceptance"


def test_progress_goes_to_the_standard_error_and_only_tables_to_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, tmp_path)
    assert main(["bench", "acceptance", str(tmp_path), "--temperatures", "0,1"]) == 0
    shown = capsys.readouterr()
    started, loaded, *lines = shown.err.splitlines()
    assert started == "loading weights ..." and loaded.startswith("loading weights: done in ")
    assert lines == [f"temperature {t}: {done} of 3 replies" for t in (0, 1) for done in (0, 3)]
    assert [line.split()[0] for line in shown.out.splitlines()] == [
        *("temperature", "domain", "a", "b", "all"),
        *("temperature", "domain", "a", "b", "all"),
    ]
