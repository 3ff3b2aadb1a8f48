"""Several engines behind one server, with real processes and engines without a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from slipstream.configs.schema import Config, ModelConfig, ParallelConfig
from slipstream.runner.messages import AddRequest, Progress, SamplingParams, StepStats
from slipstream.server.engine.engine_client import Backoff, EngineClient, WorkerFailed
from slipstream.server.engine.engines import Engines, create_engine, visible_devices
from slipstream.server.health import HealthReport, joint_report
from slipstream.server.metrics import Metrics
from slipstream.server.request_stream import EngineDead, SpeculatorRefused

from .test_engine_client import fake_on_path as fake_on_path
from .test_engine_client import tokens, until


def configured(count: int, **tricks: Any) -> Config:
    model = ModelConfig(hf_overrides=json.dumps(tricks), device="cpu")
    return Config(model=model, parallel=ParallelConfig(data_parallel_size=count))


def two(**tricks: Any) -> Engines:
    quick = Backoff(first=0.3, longest=0.5)
    config = configured(1, **tricks)
    both = [EngineClient(config, engine="fake_engine:build", backoff=quick) for _ in range(2)]
    return Engines(both)


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    engines = two()
    seen: list[Progress] = []
    await engines.start(seen.append)
    assert [p.phase for p in seen] == ["load", "load", "load", "kv_cache"]  # the first engine's
    yield engines
    await engines.shutdown()


def request(name: str, first_token: int = 1, max_tokens: int = 5) -> AddRequest:
    return AddRequest(name, [first_token], SamplingParams(seed=0, max_tokens=max_tokens))


async def test_requests_are_spread_and_each_stream_gets_its_own(engines: Engines) -> None:
    streams = [engines.submit(request(f"r{n}", max_tokens=n + 1)) for n in range(10)]
    assert {stream.engine for stream in streams} == {0, 1} and engines.num_open == 10
    for n, got in enumerate(await asyncio.gather(*map(tokens, streams))):
        assert got == [100 + i for i in range(n + 1)]
    assert engines.num_open == 0
    assert engines.ready.max_num_seqs == 128
    last = engines.submit(request("last", max_tokens=10_000))
    engines.abort("last")
    await tokens(last)
    assert engines.num_open == 0
    with pytest.raises(SpeculatorRefused, match="data-parallel-size"):
        await engines.change_speculator("load", "head")


async def test_a_dead_engine_is_restarted_while_the_other_serves(engines: Engines) -> None:
    first = engines.clients[0]
    lost = engines.submit(request("lost", max_tokens=100_000))
    kept = engines.submit(request("kept", max_tokens=100_000))
    assert (lost.engine, kept.engine) == (0, 1)
    assert first.worker_pid is not None
    os.kill(first.worker_pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="SIGKILL"):
        await tokens(lost)
    report = engines.health.report
    assert report.is_ready and report.restarts == 1 and report.detail.startswith("engine 0: ")
    states = [engine["status"] for engine in report.as_dict()["engines"]]
    assert states == ["restarting", "ready"]
    assert engines.submit(request("next")).engine == 1
    await until(lambda: first.state == "ready")
    assert engines.submit(request("again")).engine == 0
    engines.abort("kept")


async def test_a_failing_start_stops_all() -> None:
    engines = two(fail="no such model")
    with pytest.raises(WorkerFailed, match="^no such model$"):
        await engines.start()
    assert all(client.worker_pid is None for client in engines.clients)


def test_each_engine_gets_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6,7")
    assert visible_devices() == ["4", "5", "6", "7"]
    config = Config(parallel=ParallelConfig(2, 2))
    engines = create_engine(config)
    assert isinstance(engines, Engines)
    assert [client._devices for client in engines.clients] == ["4,5", "6,7"]
    assert engines.clients[1]._config.parallel == ParallelConfig(2, 1)
    with pytest.raises(WorkerFailed, match="needs 6 GPUs, but this machine shows 4"):
        create_engine(Config(parallel=ParallelConfig(2, 3)))
    assert isinstance(create_engine(configured(1)), EngineClient)
    on_cpu = create_engine(configured(2))
    assert isinstance(on_cpu, Engines) and on_cpu.clients[1]._devices is None


def test_health_is_that_of_the_best_engine() -> None:
    def report(state: Any, detail: str = "", retry: float | None = None) -> HealthReport:
        return HealthReport(state, detail, 5.0, retry, 1)

    joint = joint_report([report("restarting", "a", 9.0), report("restarting", "b", 7.0)])
    assert (joint.state, joint.detail) == ("restarting", "engine 0: a; engine 1: b")
    assert (joint.retry_at, joint.restarts) == (7.0, 2)
    assert joint_report([report("failed", "a"), report("ready")]).state == "ready"
    assert joint_report([report("draining", "end"), report("draining", "end")]).detail == "end"


def test_metrics_are_by_engine() -> None:
    metrics = Metrics("slipstream", "m")
    metrics.add_engines(2)
    metrics.engines[1].step(StepStats(num_running=3, num_generated_tokens=7))
    metrics.step(StepStats(num_running=2))

    class Stream:
        engine = 1

    timing = metrics.request(0.0, 11)
    metrics.assign([timing], [Stream()])
    timing.tokens(2, 1.0)
    timing.end("stop")
    lines = metrics.text().decode().splitlines()
    assert 'slipstream:num_requests_running{engine="0",model_name="m"} 2.0' in lines
    assert 'slipstream:num_requests_running{engine="1",model_name="m"} 3.0' in lines
    assert 'slipstream:prompt_tokens_total{engine="1",model_name="m"} 11.0' in lines
    assert sum(line == "# TYPE slipstream:generation_tokens_total counter" for line in lines) == 1
    ended = 'request_success_total{engine="1",finished_reason="stop",model_name="m"} 1.0'
    assert f"slipstream:{ended}" in lines


async def test_a_reset_of_the_prefix_caches_forgets_what_was_sent_to_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt goes to the engine that has it cached although the other has fewer requests."""
    engines = two()
    monkeypatch.setattr(EngineClient, "reset_prefix_cache", lambda client: None)

    def chosen(*num_open: int) -> int | None:
        return engines._router.choose([7] * 64, "", num_open)

    first = chosen(0, 0)
    assert first is not None
    loads = (first == 0, first == 1)  # one request more than the other
    assert chosen(*loads) == first
    engines.reset_prefix_cache()
    assert chosen(*loads) == 1 - first
