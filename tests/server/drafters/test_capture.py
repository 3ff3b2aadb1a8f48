"""Captured prompts: only with the flag, bounded, private, and usable for training."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from threading import Event

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.options import ConfigError
from slipstream.server.drafters.capture import TrafficCapture
from slipstream.server.drafters.training_prompts import read_prompts

from ..api_fakes import ScriptedEngine, config_with, http_client, make_app

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
        raise AssertionError("captured without --capture-traffic")

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
    assert caplog.text.count("stopped writing prompts") == 2


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_after_a_file_is_moved_away_a_new_private_one_starts(tmp_path: Path, mask: int) -> None:
    line = len(json.dumps({"token_ids": [1] * 10})) + 1
    old = os.umask(mask)
    try:
        capture = TrafficCapture(tmp_path / "new", max_bytes=2 * line)
        for round_ in range(3):
            for _ in range(5):
                capture.record([[1] * 10])
            capture._writer.submit(lambda: None).result(10)  # all of them are written
            assert stat.S_IMODE(capture.path.stat().st_mode) == 0o600
            assert capture.path.stat().st_size == 2 * line
            capture.path.rename(tmp_path / f"moved-{round_}")
        capture.close()
    finally:
        os.umask(old)


def test_the_mode_that_an_operator_chose_is_kept(tmp_path: Path) -> None:
    TrafficCapture(tmp_path, 1000).close()
    (tmp_path / "prompts.jsonl").chmod(0o640)
    capture = TrafficCapture(tmp_path, 1000)
    capture.record([[1]])
    capture.close()
    assert stat.S_IMODE((tmp_path / "prompts.jsonl").stat().st_mode) == 0o640


def test_the_prompts_waiting_for_a_slow_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.server.drafters.capture._MAX_WAITING", 25)
    capture = TrafficCapture(tmp_path, 10_000)
    disk = Event()
    capture._writer.submit(disk.wait)
    for _ in range(10):
        capture.record([[1] * 10])
    disk.set()
    capture._writer.submit(lambda: None).result(10)
    assert len(capture.path.read_text().splitlines()) == 2
    capture.record([[1] * 10])  # there is room again
    capture.close()
    assert len(capture.path.read_text().splitlines()) == 3


async def test_a_failing_disk_fails_no_request(tmp_path: Path) -> None:
    capture = TrafficCapture(tmp_path, 1000)
    capture.path.unlink()
    capture.path.mkdir()
    capture.record([[1, 2]])
    capture.record([[3]])
    capture.close()


def test_an_impossible_folder_is_an_error_at_start_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        make_app(ScriptedEngine(), config_with(capture_traffic=str(tmp_path / "file" / "x")))
    with pytest.raises(ConfigError, match="capture-traffic-max-bytes"):
        load_config({"capture_traffic_max_bytes": "0"})
