"""The metrics that say whether the worker serves."""

from __future__ import annotations

import re

from .api_fakes import ScriptedEngine, http_client, make_app


async def values(engine: ScriptedEngine) -> tuple[float, float]:
    async with http_client(make_app(engine)) as client:
        text = (await client.get("/metrics")).text
    found = dict(re.findall(r"slipstream:(engine_up|engine_restarts_total)\{.*?\} (\S+)", text))
    return float(found["engine_up"]), float(found["engine_restarts_total"])


async def test_a_dead_worker_shows_and_each_restart_counts_once() -> None:
    engine = ScriptedEngine()
    assert await values(engine) == (1.0, 0.0)
    engine.health.change("restarting", "the worker was killed", 2.0)
    assert await values(engine) == (0.0, 1.0)
    engine.health.change("ready")
    assert await values(engine) == (1.0, 1.0)
    engine.health.change("restarting", "the worker was killed", 2.0)
    assert await values(engine) == (0.0, 2.0)
