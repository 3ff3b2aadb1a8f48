"""Captured prompts: only when asked for, bounded, private, and fit to train on."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.options import ConfigError
from slipstream.server.capture import TrafficCapture
from slipstream.server.training_prompts import read_prompts

from .api_fakes import ScriptedEngine, config_with, http_client, make_app

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TEXT = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 2}


async def talk(**server: object) -> ScriptedEngine:
    """A chat, a completion of two prompts, and a request that is refused."""
    engine = ScriptedEngine()
    app = make_app(engine, config_with(**server))
    async with http_client(app) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
        refused = await client.post("/v1/completions", json=TEXT | {"max_tokens": 10**6})
        assert refused.status_code == 400
    if app.state.services.capture is not None:
        app.state.services.capture.close()
    return engine


async def test_without_the_flag_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("captured without being asked")

    monkeypatch.setattr(TrafficCapture, "__init__", refuse)
    monkeypatch.setattr(TrafficCapture, "record", refuse)
    monkeypatch.chdir(tmp_path)
    engine = await talk()
    assert len(engine.requests) == 3
    assert load_config({}).server.capture_traffic is None
    assert not list(tmp_path.iterdir())


async def test_prompts_of_all_routes_can_be_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "captured"
    engine = await talk(capture_traffic=str(folder))
    found = [prompt.token_ids for prompt in read_prompts(folder / "prompts.jsonl")]
    assert found == [tuple(request.prompt_token_ids) for request in engine.requests]
    assert stat.S_IMODE(os.stat(folder / "prompts.jsonl").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


async def test_capture_stops_at_its_size_and_goes_on_counting_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = len(json.dumps({"token_ids": [1] * 10})) + 1
    for _ in range(2):
        capture = TrafficCapture(tmp_path, max_bytes=3 * line)
        for _ in range(5):
            capture.record([[1] * 10])
        capture.close()
        assert (tmp_path / "prompts.jsonl").stat().st_size == 3 * line
    assert caplog.text.count("no more prompts") == 2


async def test_a_disk_that_fails_ends_no_request(tmp_path: Path) -> None:
    capture = TrafficCapture(tmp_path, 1000)
    capture.path.unlink()
    capture.path.mkdir()
    capture.record([[1, 2]])
    capture.record([[3]])
    capture.close()


def test_a_folder_that_cannot_be_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        make_app(ScriptedEngine(), config_with(capture_traffic=str(tmp_path / "file" / "x")))
    with pytest.raises(ConfigError, match="capture-traffic-max-bytes"):
        load_config({"capture_traffic_max_bytes": "0"})
