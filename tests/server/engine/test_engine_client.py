"""The worker's life as the server sees it, with real processes and an engine without a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from slipstream.configs.schema import Config, ModelConfig, ServerConfig
from slipstream.runner.messages import (
    AddRequest,
    Progress,
    SamplingParams,
    SetVocabulary,
    StepStats,
)
from slipstream.server.engine.engine_client import (
    Backoff,
    EngineClient,
    EngineDead,
    RequestStream,
    WorkerFailed,
)
from slipstream.server.engine.worker_watch import Watchdog
from slipstream.server.request_stream import ShutDown

pytestmark = pytest.mark.asyncio(loop_scope="module")

KILL, RAISE, HANG, EXIT = 60_001, 60_002, 60_003, 60_004  # as in fake_engine
QUICK = Backoff(first=0.05, longest=0.2)


@pytest.fixture(autouse=True, scope="module")
def fake_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        yield


def make_client(backoff: Backoff = QUICK, **tricks: Any) -> EngineClient:
    config = Config(model=ModelConfig(hf_overrides=json.dumps(tricks)))
    return EngineClient(config, engine="fake_engine:build", backoff=backoff)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[EngineClient]:
    client = make_client()
    await client.start()
    yield client
    await client.shutdown()


@pytest.fixture
def client(shared: EngineClient) -> Iterator[EngineClient]:
    """One client for all tests that leave it as they found it: ready, without a request."""
    stats = shared.stats
    yield shared
    shared.stats = stats
    assert shared.state == "ready" and shared.num_open == 0


def request(name: str, max_tokens: int = 5, first_token: int = 1) -> AddRequest:
    return AddRequest(name, [first_token], SamplingParams(seed=0, max_tokens=max_tokens))


async def tokens(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def until(condition: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_outputs_reach_their_own_streams(client: EngineClient) -> None:
    streams = [client.submit(request(f"r{n}", max_tokens=n + 1)) for n in range(20)]
    assert client.num_open == 20
    for n, got in enumerate(await asyncio.gather(*map(tokens, streams))):
        assert got == [100 + i for i in range(n + 1)]
    assert client.num_open == 0


async def test_start_reports_progress_and_facts() -> None:
    client = make_client()
    seen: list[Progress] = []
    ready = await client.start(seen.append)
    assert [p.phase for p in seen] == ["load", "load", "load", "kv_cache"]
    assert ready.vocab_size == client.ready.vocab_size == 49152
    assert client.state == "ready"
    await client.shutdown()


@pytest.mark.parametrize(
    ("tricks", "words"),
    [
        ({"fail": "no such model\nand a traceback"}, "^no such model$"),
        ({"exit": 3}, "^the worker ended with status 3$"),
    ],
)
async def test_failing_start_is_one_sentence(tricks: dict[str, Any], words: str) -> None:
    client = make_client(**tricks)
    with pytest.raises(WorkerFailed, match=words):
        await client.start()
    assert client.state == "failed"
    with pytest.raises(EngineDead):
        client.submit(request("r"))
    await client.shutdown()


async def test_slow_reader_delays_nobody(client: EngineClient) -> None:
    slow = client.submit(request("slow", max_tokens=200))
    fast = client.submit(request("fast", max_tokens=200))
    await asyncio.wait_for(tokens(fast), 5)
    assert len(await tokens(slow)) == 200


async def test_stats_come_once_a_step_and_a_bug_there_ends_no_request(
    client: EngineClient,
) -> None:
    generated = 0

    def count(stats: StepStats) -> None:
        nonlocal generated
        generated += stats.num_generated_tokens
        raise RuntimeError("a bug in the metrics")

    client.stats = count
    assert len(await tokens(client.submit(request("r", max_tokens=7)))) == 7
    assert generated == 7


async def test_abort_ends_the_stream_and_frees_the_request(client: EngineClient) -> None:
    running: list[int] = []
    client.stats = lambda stats: running.append(stats.num_running)
    stream = client.submit(request("long", max_tokens=10**6))
    await anext(stream)
    client.abort("long")
    client.abort("long")  # again: nothing happens
    await asyncio.wait_for(tokens(stream), 1)
    await asyncio.sleep(0.05)
    running.clear()
    await tokens(client.submit(request("next", max_tokens=3)))
    assert running[-1] == 0


@pytest.mark.parametrize(
    ("trick", "words"),
    [
        (KILL, "killed by SIGKILL"),
        (RAISE, "the device is lost"),
        (EXIT, "ended with status 3"),
    ],
)
async def test_death_ends_every_stream_soon_and_the_worker_comes_back(
    client: EngineClient, trick: int, words: str
) -> None:
    streams = [client.submit(request(f"r{n}", max_tokens=10**6)) for n in range(3)]
    for stream in streams:
        await anext(stream)
    first_pid, restarts = client.worker_pid, client.health.report.restarts
    began = time.monotonic()
    streams.append(client.submit(request("bad", first_token=trick)))
    results = await asyncio.gather(*map(tokens, streams), return_exceptions=True)
    assert time.monotonic() - began < 2
    for result in results:
        assert type(result) is EngineDead and words in str(result)
        assert result.retry_after >= 1
    assert client.state == "restarting" and words in client.health.report.detail
    with pytest.raises(EngineDead, match="restarting"):
        client.submit(request("early"))
    await until(lambda: client.state == "ready")
    assert client.worker_pid != first_pid
    assert client.health.report.restarts == restarts + 1
    assert len(await tokens(client.submit(request("again")))) == 5


async def test_outside_kill_while_idle_is_seen(client: EngineClient) -> None:
    assert client.worker_pid is not None
    os.kill(client.worker_pid, signal.SIGKILL)
    await until(lambda: client.state == "restarting", 2)
    await until(lambda: client.state == "ready")


async def test_failing_restart_is_tried_again_until_it_works(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    client = make_client(fail_after_first=str(broken))
    await client.start()
    assert client.worker_pid is not None
    os.kill(client.worker_pid, signal.SIGKILL)
    await until(lambda: "still broken" in client.health.report.detail)
    assert client.health.report.as_dict()["status"] == "restarting"
    broken.unlink()
    await until(lambda: client.state == "ready")
    assert client.health.report.restarts == 1
    await client.shutdown()


async def test_drain_lets_open_requests_finish_and_refuses_new_ones() -> None:
    client = make_client(step_seconds=0.01)
    await client.start()
    pid = client.worker_pid
    open_request = asyncio.create_task(tokens(client.submit(request("open", max_tokens=30))))
    await asyncio.sleep(0.05)
    shutdown = asyncio.create_task(client.shutdown(drain_timeout=10))
    await asyncio.sleep(0.01)
    with pytest.raises(ShutDown, match="shutting down"):
        client.submit(request("late"))
    assert len(await open_request) == 30
    await asyncio.wait_for(shutdown, 3)
    assert pid is not None and is_gone(pid)


async def test_drain_ends_requests_that_take_too_long() -> None:
    client = make_client()
    await client.start()
    stream = client.submit(request("endless", max_tokens=10**6))
    began = time.monotonic()
    await client.shutdown(drain_timeout=0.2)
    assert 0.2 <= time.monotonic() - began < 3
    with pytest.raises(ShutDown, match="shutting down"):
        await tokens(stream)


async def test_shutdown_is_clean_when_the_worker_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goodbye = tmp_path / "goodbye"
    monkeypatch.setenv("FAKE_ENGINE_GOODBYE", str(goodbye))
    client = make_client()
    await client.start()
    await client.shutdown()
    assert goodbye.read_text() == "bye"  # the engine could free what it holds


async def test_worker_that_does_not_listen_is_ended() -> None:
    client = make_client()
    await client.start()
    client.submit(request("stuck", first_token=HANG))
    await asyncio.sleep(0.2)
    pid, began = client.worker_pid, time.monotonic()
    await client.shutdown(grace=0.2)
    assert time.monotonic() - began < 2
    assert pid is not None and is_gone(pid)


async def test_shutdown_in_the_middle_of_a_start_leaves_no_process() -> None:
    client = make_client(start_seconds=60)
    before = set(psutil.Process().children(recursive=True))
    start = asyncio.create_task(client.start())
    await until(lambda: set(psutil.Process().children(recursive=True)) - before)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await client.shutdown()
    assert not set(psutil.Process().children(recursive=True)) - before


async def test_frozen_worker_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.runner.pair.HEARTBEAT_MS", 100)
    monkeypatch.setattr("slipstream.runner.pair.HEARTBEAT_TIMEOUT_MS", 400)
    client = make_client()
    await client.start()
    stream = client.submit(request("open", max_tokens=10**6))
    await anext(stream)
    pid = client.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDead, match="stopped answering"):
        await asyncio.wait_for(tokens(stream), 5)
    await until(lambda: client.state == "ready")
    assert is_gone(pid)
    await client.shutdown()


async def test_worker_that_hangs_in_a_step_is_started_again() -> None:
    config = Config(server=ServerConfig(worker_timeout=0.5))
    client = EngineClient(config, engine="fake_engine:build", backoff=QUICK)
    await client.start()
    await asyncio.sleep(0.8)  # idle is not hung
    pid = client.worker_pid
    assert pid is not None and client.health.report.restarts == 0
    assert len(await tokens(client.submit(request("long", max_tokens=600)))) == 600  # nor is busy
    began = time.monotonic()
    with pytest.raises(EngineDead, match="finished no step in 0.5 s"):
        await tokens(client.submit(request("hangs", first_token=HANG)))
    assert 0.4 < time.monotonic() - began < 2.5
    await until(lambda: client.state == "ready")
    assert is_gone(pid)
    assert len(await tokens(client.submit(request("after")))) == 5
    await client.shutdown()


async def test_a_server_that_was_stopped_itself_suspects_nobody() -> None:
    watchdog = Watchdog(0.5, lambda: True)
    bite = asyncio.create_task(watchdog.bite())
    await asyncio.sleep(0.1)
    time.sleep(1.0)  # the event loop stands still, as after SIGSTOP
    await asyncio.sleep(0.1)
    assert not bite.done()
    watchdog.feed()
    await asyncio.sleep(0.3)
    assert not bite.done()
    await asyncio.wait_for(bite, 2)


async def test_watchdog_without_a_timeout_never_bites() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Watchdog(0, lambda: True).bite(), 0.1)


@pytest.mark.parametrize("before_start", [True, False])
async def test_every_worker_is_told_the_vocabulary_before_its_first_request(
    before_start: bool,
) -> None:
    client = make_client()
    vocabulary = SetVocabulary([b"a", b"b", b"\xc3"], [0])
    if before_start:
        client.set_vocabulary(vocabulary)
    await client.start()
    if not before_start:
        client.set_vocabulary(vocabulary)
    known = [output.num_cached_tokens async for output in client.submit(request("a"))]
    with pytest.raises(EngineDead):
        await tokens(client.submit(request("b", first_token=KILL)))
    await until(lambda: client.state == "ready")
    known += [output.num_cached_tokens async for output in client.submit(request("c"))]
    await client.shutdown()
    assert set(known) == {3}


async def test_what_one_turn_posts_leaves_as_one_message(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client._worker is not None
    channel = client._worker.channel
    sent: list[int] = []
    send = channel.send

    def counted(messages: list[Any]) -> None:
        sent.append(len(messages))
        send(messages)

    monkeypatch.setattr(channel, "send", counted)
    streams = [client.submit(request(f"r{n}")) for n in range(3)]
    assert [await tokens(stream) for stream in streams] == [
        await tokens(client.submit(request("s")))
    ] * 3
    assert sent == [3, 1]


async def test_worker_that_dies_in_a_drain_is_not_started_again() -> None:
    client = make_client()
    await client.start()
    stream = client.submit(request("r", first_token=HANG))
    draining = asyncio.create_task(client.drain(10))
    await asyncio.sleep(0.05)
    assert client._worker is not None
    os.kill(client._worker.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await tokens(stream)
    await asyncio.wait_for(draining, 2)
    await asyncio.sleep(0.5)  # longer than the back-off
    assert client.state == "draining" and client.health.report.as_dict()["status"] == "draining"
    assert client._worker is None
    await client.shutdown()
