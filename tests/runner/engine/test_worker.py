"""The worker's loop, with a scripted channel and engine."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest

from slipstream.configs.options import ConfigError
from slipstream.configs.schema import Config
from slipstream.runner.engine import worker
from slipstream.runner.errors import DrafterError, ModelLoadError
from slipstream.runner.messages import (
    AbortRequests,
    Fatal,
    Progress,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepStats,
)
from slipstream.runner.process import EngineOrders, WorkerOrders


class ScriptedChannel:
    """Returns one prepared list per `receive`, then Shutdown; records what is sent."""

    def __init__(self, *incoming: list[Any]) -> None:
        self.incoming = list(incoming)
        self.timeouts: list[float | None] = []
        self.sent: list[Any] = []
        self.closed = False

    def receive(self, timeout: float | None) -> list[Any]:
        self.timeouts.append(timeout)
        return self.incoming.pop(0) if self.incoming else [Shutdown()]

    def has_messages(self) -> bool:
        return False

    def also_wait_for(self, socket: Any) -> None:
        assert socket is None

    def send(self, messages: list[Any]) -> None:
        self.sent.append(messages)

    def close(self) -> None:
        self.closed = True


class ScriptedEngine:
    """Has work for a fixed number of steps after each batch of messages."""

    ready = "ready"

    def __init__(self, steps_per_batch: int = 1, fails: Exception | None = None) -> None:
        self.steps_per_batch = steps_per_batch
        self.fails = fails
        self.left = 0
        self.handled: list[Any] = []
        self.is_shut_down = False

    def handle(self, messages: list[Any]) -> None:
        self.handled.append(messages)
        self.left += self.steps_per_batch

    idle_seconds = calls = None

    def check(self) -> None:
        """There are no other ranks."""

    def has_work(self) -> bool:
        return self.left > 0

    def step(self, interrupted: Any) -> list[StepOutputs]:
        assert not interrupted()
        if self.fails:
            raise self.fails
        self.left -= 1
        if self.left % 2:
            return []  # nothing finished in this step
        return [StepOutputs([RequestOutput("r", [1])], StepStats())] * 2

    def shutdown(self) -> None:
        self.is_shut_down = True


def test_blocks_when_idle_polls_when_busy_and_sends_one_list_a_step() -> None:
    channel = ScriptedChannel([AbortRequests(["a"])], [], [], [])
    engine = ScriptedEngine(steps_per_batch=3)
    worker.run(engine, channel)  # type: ignore[arg-type]
    assert channel.timeouts == [None, 0.0, 0.0, None, None]
    assert engine.handled == [[AbortRequests(["a"])]]
    assert [len(messages) for messages in channel.sent] == [2, 2]


def serve(
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedEngine | Exception,
    place: EngineOrders | None = None,
) -> tuple[int, ScriptedChannel]:
    channel = ScriptedChannel([AbortRequests(["a"])])

    def build(config: Config, progress: Any) -> ScriptedEngine:
        progress(Progress("load", 1, 1))
        if isinstance(engine, Exception):
            raise engine
        return engine

    module = types.ModuleType("scripted_engine")
    module.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scripted_engine", module)
    monkeypatch.setattr(worker, "WorkerChannel", lambda endpoint, key: channel)
    monkeypatch.setattr(worker.gc, "freeze", lambda: None)
    orders = WorkerOrders("ipc://none", 1, Config(), engine="scripted_engine:build", engines=place)
    return worker.serve(orders), channel


def test_reports_progress_then_ready_and_ends_with_status_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    status, channel = serve(monkeypatch, engine)
    assert status == 0
    assert channel.sent[:2] == [[Progress("load", 1, 1)], ["ready"]]
    assert engine.is_shut_down and channel.closed


@pytest.mark.parametrize(
    ("fault", "of_drafter"),
    [
        (ModelLoadError("no such model"), False),
        (ConfigError("no such model\n"), False),
        (DrafterError("no such model"), True),
    ],
)
def test_failing_build_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    of_drafter: bool,
) -> None:
    status, channel = serve(monkeypatch, fault)
    assert status == 1
    assert channel.sent[-1] == [Fatal("no such model", of_drafter)]
    assert channel.closed
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_a_bug_in_building_keeps_its_name_and_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, channel = serve(monkeypatch, ValueError("not enough values"))
    assert channel.sent[-1] == [Fatal("ValueError: not enough values")]
    assert "Traceback" in caplog.text


def test_failing_step_is_fatal_and_frees_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(fails=KeyError("slot"))
    status, channel = serve(monkeypatch, engine)
    assert status == 1
    assert channel.sent[-1] == [Fatal("KeyError: 'slot'")]
    assert engine.is_shut_down
    assert "Traceback" in caplog.text and caplog.records[-1].levelno == logging.ERROR


def test_an_error_that_another_engines_end_caused_is_not_reported_if_the_server_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(fails=RuntimeError("connection closed by peer"))
    status, channel = serve(monkeypatch, engine, EngineOrders(0, 2, "folder"))
    assert status == 0 and engine.is_shut_down
    assert channel.timeouts[-1] == pytest.approx(1.0, abs=0.5)  # the wait for the server
    assert channel.sent[-1] == ["ready"] and not caplog.records


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("\n  CUDA is lost\nTraceback"), "CUDA is lost"),
        (AssertionError(), "AssertionError"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
    ],
)
def test_errors_become_one_line(error: Exception, text: str) -> None:
    assert worker.sentence(error) == text
