"""Clients in several processes: what they send together, and what they report."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from slipstream.server.bench import client_processes as clients
from slipstream.server.bench.load import BenchRequest, mixed_requests
from slipstream.server.bench.serve import Target

CHUNK = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\n'
REPLY = CHUNK * 3 + USAGE + b"data: [DONE]\n\n"


class Server:
    """Answers every request with three chunks after a moment, and counts what runs at once."""

    def __init__(self) -> None:
        self.num_running, self.most, self.bodies = 0, 0, Counter[bytes]()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        assert started.wait(10)

    def _run(self, started: threading.Event) -> None:
        async def main() -> None:
            self._end = asyncio.Event()
            async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
                self.port = server.sockets[0].getsockname()[1]
                started.set()
                await self._end.wait()

        self._loop.run_until_complete(main())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0])
            self.bodies[await reader.readexactly(length)] += 1
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            await asyncio.sleep(0.03)
            self.num_running -= 1
            length = str(len(REPLY)).encode()
            head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: " + length
            writer.write(head + b"\r\n\r\n" + REPLY)
            await writer.drain()
            break
        writer.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def load_of(server: Server, count: int, most: int | None) -> clients.Load:
    target = Target(f"http://127.0.0.1:{server.port}/v1/completions", "m", chat=False)
    requests = [BenchRequest(f"prompt {place}", 3) for place in range(count)]
    return clients.Load(target, requests, [0.0] * count, most, 30.0)


def test_processes_send_each_request_once_within_the_concurrency(server: Server) -> None:
    ticks: list[None] = []
    measured = clients.send_from(3, load_of(server, 40, 7), lambda: ticks.append(None))
    assert [outcome.error for outcome in measured.outcomes] == [None] * 40
    assert [outcome.output_tokens for outcome in measured.outcomes] == [3] * 40
    assert len(server.bodies) == 40 and set(server.bodies.values()) == {1}
    assert server.most <= 7 and len(ticks) == 40
    # At least six rounds of 0.03 s in the process with two places, and no process's start in it.
    assert 0.2 <= measured.seconds < 20.0
    assert 0.0 < measured.cpu_share <= 2.0


def test_due_times_count_from_the_common_start(server: Server) -> None:
    load = replace(load_of(server, 6, None), due=[0.1 * place for place in range(6)])
    measured = clients.send_from(2, load, lambda: None)
    assert 0.49 <= measured.seconds < 20.0
    assert [outcome.error for outcome in measured.outcomes] == [None] * 6


def test_parts_share_concurrency_and_requests() -> None:
    load = clients.Load(Target("u", "m", chat=False), [*range(10)], [*range(10)], 5, 1.0)  # type: ignore[arg-type]
    parts = [load.part(index, 3) for index in range(3)]
    assert [part.max_concurrency for part in parts] == [2, 2, 1]
    assert sorted(each for part in parts for each in part.requests) == [*range(10)]  # type: ignore[type-var]
    assert all(part.requests == part.due for part in parts)


class _Fatal:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (3,)


def test_a_client_that_dies_is_an_error_and_nobody_waits_for_it(server: Server) -> None:
    load = replace(
        load_of(server, 4, 4), requests=[BenchRequest("a", 1), BenchRequest(_Fatal(), 1)]
    )  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="a client process died"):
        clients.send_from(2, load, lambda: None)
    assert time.monotonic() - began < 60


def test_the_default_grows_with_cores_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert [clients.default_processes(n, None) for n in (1, 31, 32, 1000)] == [1, 1, 2, 8]
    assert clients.default_processes(1000, 64) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert clients.default_processes(1000, None) == 1


def test_mixed_requests_have_chats_long_prompts_and_a_shared_prefix() -> None:
    requests = mixed_requests(400, 1024, False, 0)
    assert requests == mixed_requests(400, 1024, False, 0) != mixed_requests(400, 1024, False, 1)
    long = [each for each in requests if len(each.prompt) == 3000 and each.output_len == 64]
    heads = Counter(tuple(each.prompt[:2000]) for each in requests if len(each.prompt) > 2000)  # type: ignore[arg-type]
    [(_, shared)] = heads.most_common(1)
    assert 60 < len(long) < 140 and 60 < shared < 140
    assert len(requests) - len(long) - shared > 150
    words = mixed_requests(50, 64, True, 0)
    assert all(isinstance(each.prompt, str) for each in words)
