"""The metrics that say whether the worker serves."""

from __future__ import annotations

import re

import msgspec

from slipstream.runner.messages import StepStats
from slipstream.server.metrics import Metrics

from ..api_fakes import ScriptedEngine, http_client, make_app


async def values(engine: ScriptedEngine) -> tuple[float, float]:
    async with http_client(make_app(engine)) as client:
        text = (await client.get("/metrics")).text
    found = dict(re.findall(r"slipstream:(engine_up|engine_restarts_total)\{.*?\} (\S+)", text))
    return float(found["engine_up"]), float(found["engine_restarts_total"])


def test_k_and_the_drafters_health_show() -> None:
    metrics = Metrics("slipstream", "m")

    def shown(name: str, **labels: str) -> float | None:
        labels |= {"model_name": "m", "engine": "0"}
        return metrics.registry.get_sample_value(f"slipstream:spec_decode_{name}", labels)

    def state() -> tuple[float | None, float | None]:
        return shown("drafter_healthy"), shown("current_k")

    assert state() == (1, 0)
    metrics.step(StepStats(current_k=3, k_reason="gain", drafter_healthy=True))
    metrics.step(StepStats(current_k=3, k_reason="gain"))
    ill = StepStats(current_k=0, k_reason="unhealthy", drafter_healthy=False)
    ill.drafter_troubles = {"drop": 1}
    metrics.step(ill)
    metrics.step(StepStats())  # tells nothing of drafts
    assert state() == (0, 0)
    assert shown("k_steps_total", k="3", reason="gain") == 2
    assert shown("k_steps_total", k="0", reason="unhealthy") == 1
    assert shown("drafter_troubles_total", sign="drop") == 1
    assert shown("drafter_troubles_total", sign="zero") == 0
    metrics.step(StepStats(current_k=2, k_reason="gain"))
    metrics.engine_gone()
    assert state() == (1, 0)


async def test_a_dead_worker_shows_and_each_restart_counts_once() -> None:
    engine = ScriptedEngine()
    assert await values(engine) == (1.0, 0.0)
    engine.health.change("restarting", "the worker was killed", 2.0)
    assert await values(engine) == (0.0, 1.0)
    engine.health.change("ready")
    assert await values(engine) == (1.0, 1.0)
    engine.health.change("restarting", "the worker was killed", 2.0)
    assert await values(engine) == (0.0, 2.0)


def test_claims_are_counted_once_a_worker_however_often_one_looks() -> None:
    metrics, engine = Metrics("slipstream", "m"), ScriptedEngine()
    first, second = (msgspec.structs.replace(engine.ready, lowered_claims=["a"]) for _ in range(2))
    for ready in (first, first, second, second):
        metrics.engine_ready(ready)
    labels = {"model_name": "m", "engine": "0", "backend": "a"}
    name = "slipstream:attention_claims_lowered_total"
    assert metrics.registry.get_sample_value(name, labels) == 2
