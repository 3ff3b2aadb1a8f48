"""POST /v1/speculator and a real worker process: its death at any stage, and the server's end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from slipstream.configs.schema import Config, ModelConfig, SpeculativeConfig
from slipstream.server.api.speculator import Trial
from slipstream.server.chat_templates.chat_template import ChatTemplate
from slipstream.server.engine.engine_client import Backoff, EngineClient
from slipstream.server.request_stream import EngineDead, SpeculatorRefused
from slipstream.server.startup.app import create_app

from ...cases import some
from ..api_fakes import TEMPLATE, TOKENIZER, config_with, http_client
from .test_engine_client import until

ADMIN = {"authorization": "Bearer root"}
OLD = {"method": "eagle3", "model": "old", "on_trial": None, "fallback": None}


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    """Runs the fake engine, whose drafter is called "old" at first; the probes are short."""
    monkeypatch.setattr("slipstream.server.api.speculator._PER_DOMAIN", 1)
    monkeypatch.setattr("slipstream.server.api.speculator._PROBE_TOKENS", 8)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    config = Config(
        model=ModelConfig(hf_overrides=json.dumps({"step_seconds": 0.001})),
        speculative=SpeculativeConfig("eagle3", "old"),
    )
    client = EngineClient(config, engine="fake_engine:build", backoff=Backoff(0.05, 0.2))
    await client.start()
    yield client
    await client.shutdown()


def app_of(client: EngineClient) -> FastAPI:
    config = config_with(admin_api_key=("root",))
    template = ChatTemplate(TEMPLATE, {})
    return create_app(config, client, tokenizer=TOKENIZER, template=template)


async def post(app: FastAPI, model: str, force: bool = False) -> httpx.Response:
    async with http_client(app) as http:
        body = {"model": model, "force": force}
        return await http.post("/v1/speculator", json=body, headers=ADMIN)


async def told(app: FastAPI) -> dict[str, Any]:
    async with http_client(app) as http:
        found: dict[str, Any] = (await http.get("/v1/speculator", headers=ADMIN)).json()
        return found


async def kill(client: EngineClient) -> None:
    """The worker, and wait for the next one."""
    pid, number = client.worker_pid, client.health.report.restarts
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: client.health.report.restarts > number and client.state == "ready")


def check_503(reply: httpx.Response) -> None:
    assert reply.status_code == 503, reply.text
    error = reply.json()["error"]
    assert error["type"] == "service_unavailable" and error["code"] == "engine_dead", error
    assert int(reply.headers["retry-after"]) >= 1


async def test_a_worker_killed_at_any_stage_is_a_503_and_the_old_drafter_comes_back(
    client: EngineClient,
) -> None:
    app = app_of(client)
    for stage, force in (("load", False), ("try", False), ("revert", False), ("keep", True)):
        check_503(await post(app, f"kill:{stage}", force))
        assert await told(app) == OLD
        refused = await post(app, "new")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
        await until(lambda: client.state == "ready")
        assert client.ready.device_name == "old"
        tried = await post(app, "new")
        assert tried.status_code == 200 and not tried.json()["swapped"], stage
    assert (await post(app, "new", force=True)).json()["swapped"]
    assert (await told(app))["model"] == "new"
    await kill(client)
    assert client.ready.device_name == "new"


@pytest.mark.parametrize(
    ("after", "force"),
    some(
        [(after, force) for after in (0, 1, 2) for force in (False, True)],
        kept=[(0, False), (1, True), (2, False)],
    ),
)
async def test_a_worker_that_is_back_before_anyone_looks_has_no_trial(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, force: bool, after: int
) -> None:
    """Killed and started again before or behind a probe, when nobody waits for an answer."""
    probe, num_probes = Trial._probe, 0

    async def probed(self: Trial, engine: Any) -> Any:
        nonlocal num_probes
        if num_probes == after == 0:
            await kill(client)
        tally = await probe(self, engine)
        num_probes += 1
        if num_probes == after:
            await kill(client)
        return tally

    app = app_of(client)
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "_probe", probed)
        check_503(await post(app, "new", force))
    assert client.ready.device_name == "old"
    tried = await post(app, "new", force)
    assert tried.status_code == 200 and tried.json()["swapped"] is force


async def test_the_answer_to_a_caller_who_left_is_not_the_next_ones(client: EngineClient) -> None:
    asked = asyncio.create_task(client.change_speculator("load", "slow"))
    await asyncio.sleep(0.05)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await client.change_speculator("revert")  # waits until it is loaded
    with pytest.raises(SpeculatorRefused, match="nothing to revert"):
        await client.change_speculator("revert")
    await client.change_speculator("load", "new")
    await client.change_speculator("keep")
    await kill(client)
    assert client.ready.device_name == "new"


async def test_a_drafter_that_was_kept_for_a_caller_who_left_is_the_next_workers(
    client: EngineClient,
) -> None:
    await client.change_speculator("load", "new")
    asked = asyncio.create_task(client.change_speculator("keep"))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    with pytest.raises(SpeculatorRefused):
        await client.change_speculator("revert")
    await kill(client)
    assert client.ready.device_name == "new"


async def test_a_worker_that_hangs_while_it_exchanges_is_a_503(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request runs then that could be found to wait."""
    monkeypatch.setattr(client._watchdog, "_timeout", 0.5)
    await kill(client)  # the next one is watched so
    app = app_of(client)
    check_503(await asyncio.wait_for(post(app, "hang:try"), 10))
    await until(lambda: client.state == "ready")
    assert client.ready.device_name == "old"


async def lost_drafters(app: FastAPI) -> float:
    async with http_client(app) as http:
        text = (await http.get("/metrics")).text
    found = re.search(r"^slipstream:spec_decode_lost_drafters_total\{.*\} (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


async def test_a_worker_whose_kept_drafter_was_deleted_serves_with_the_next_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    configured, kept = tmp_path / "configured", tmp_path / "kept"
    for folder in (configured, kept):
        folder.mkdir()
    config = Config(speculative=SpeculativeConfig("eagle3", str(configured), 3))
    client = EngineClient(config, engine="fake_engine:build", backoff=Backoff(0.05, 0.2))
    await client.start()
    app = app_of(client)
    try:
        assert (await post(app, str(kept), force=True)).json()["swapped"]
        kept.rmdir()
        await kill(client)
        state = await told(app)
        why = f"cannot load the drafter {kept} (the drafter {kept} does not exist): "
        assert state["fallback"] == why + f"using the configured one, {configured}"
        assert (state["method"], state["model"]) == ("eagle3", str(configured))
        assert client.ready.device_name == str(configured) and await lost_drafters(app) == 1
        configured.rmdir()
        await kill(client)
        state = await told(app)
        assert (state["method"], state["model"]) == ("off", None)
        assert state["fallback"].endswith("serving without a drafter")
        assert client.ready.device_name == "" and await lost_drafters(app) == 2
        assert caplog.text.count("cannot load the drafter ") == 2 and why in caplog.text
        names = {record.name for record in caplog.records if why in record.getMessage()}
        assert names == {"slipstream.speculator"}
    finally:
        await client.shutdown()


async def test_a_model_that_is_gone_is_not_the_drafters_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    tricks = json.dumps({"fail_after_first": str(tmp_path / "first")})
    config = Config(
        model=ModelConfig(hf_overrides=tricks), speculative=SpeculativeConfig("eagle3", "old")
    )
    client = EngineClient(config, engine="fake_engine:build", backoff=Backoff(0.05, 0.05))
    await client.start()
    try:
        assert client.worker_pid is not None
        os.kill(client.worker_pid, signal.SIGKILL)
        await until(lambda: "still broken" in client.health.report.detail)
        assert client.drafter == "old" and client.drafter_fallback is None
    finally:
        await client.shutdown()


async def test_the_servers_end_ends_a_trial(client: EngineClient) -> None:
    app = app_of(client)
    asked = asyncio.create_task(post(app, "slow"))
    await asyncio.sleep(0.1)
    await client.drain(0.0)
    refused = await post(app, "new")
    assert refused.status_code == 503 and "draining" in refused.json()["error"]["message"]
    with pytest.raises(EngineDead):
        await client.change_speculator("revert")
    await client.shutdown()
    ended = await asked
    assert ended.status_code == 503
    assert ended.json()["error"]["code"] == "server_shutting_down"
