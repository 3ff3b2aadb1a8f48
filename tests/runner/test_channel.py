"""The socket between the processes, both ends in one process."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slipstream.runner.channel import ServerChannel, WorkerChannel, share, unshare
from slipstream.runner.messages import (
    AbortRequests,
    AddRequest,
    Fatal,
    GrammarSpec,
    Progress,
    RequestOutput,
    SamplingParams,
    Shutdown,
    StepOutputs,
    StepStats,
    TokenLogprobs,
    encoder,
    pack_logprobs,
)
from slipstream.runner.parallel.engine_group import Calls
from slipstream.runner.process import EngineOrders


@pytest.fixture
async def ends() -> Iterator[tuple[ServerChannel, WorkerChannel]]:  # type: ignore[misc]
    server = ServerChannel()
    worker = WorkerChannel(server.endpoint)
    yield server, worker
    worker.close()
    server.close()


async def test_lists_arrive_whole_in_order_both_ways(
    ends: tuple[ServerChannel, WorkerChannel],
) -> None:
    server, worker = ends
    worker.send([Progress("load", 1, 2), Progress("load", 2, 2)])
    worker.send([Fatal("sorry")])
    assert await server.receive() == [Progress("load", 1, 2), Progress("load", 2, 2)]
    assert await server.receive() == [Fatal("sorry")]
    server.send([AbortRequests(["a"])])
    server.send([AbortRequests(["b"]), Shutdown()])
    got = worker.receive(1.0)
    while len(got) < 3:
        got += worker.receive(1.0)
    assert got == [AbortRequests(["a"]), AbortRequests(["b"]), Shutdown()]


def children(
    num_prompts: int, n: int, length: int, **options: object
) -> list[AddRequest]:  # as `Generation` makes them
    base = SamplingParams(seed=5, max_tokens=0, **options)  # type: ignore[arg-type]
    prompts = [[p] * length for p in range(num_prompts)]
    return [
        AddRequest(
            f"r-{p}-{i}",
            prompt,
            msgspec.structs.replace(
                base, seed=5 + i, max_tokens=9 + p, prompt_logprobs=None if i else 2
            ),
            -1,
            "salt",
        )
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"allowed_token_ids": list(range(50_000))},
        {"grammar": GrammarSpec("regex", "a" * 100_000)},
        {"prediction_token_ids": list(range(50_000)), "bad_words_token_ids": [[1] * 9] * 999},
    ],
)
def test_children_send_shared_parts_once(options: dict[str, object]) -> None:
    alone = len(encoder.encode(children(3, 1, 5_000, **options)[:1]))
    made = children(3, 128, 5_000, **options)
    packed = list(share([AbortRequests(["x"]), *made, Shutdown()]))
    assert [type(message).__name__ for message in packed] == [
        "AbortRequests", "AddChildren", "Shutdown",
    ]  # fmt: skip
    assert len(encoder.encode(packed)) < 3 * alone + 3 * 128 * 40
    assert list(unshare(packed)) == [AbortRequests(["x"]), *made, Shutdown()]


def test_requests_with_other_parameters_are_not_packed() -> None:
    first, second = children(1, 2, 3), children(1, 2, 3, temperature=0.5)
    third = children(1, 1, 3)
    for request in third:
        request.cache_salt = "another"
    same = children(1, 1, 3, allowed_token_ids=[1, 2])  # equal lists, but not the same object
    other = children(1, 1, 3, allowed_token_ids=[1, 2])
    made = [*first, *second, *third, *same, *other]
    packed = list(share(made))
    assert [type(message).__name__ for message in packed] == [
        "AddChildren", "AddChildren", "AddRequest", "AddRequest", "AddRequest",
    ]  # fmt: skip
    assert list(unshare(packed)) == made


async def test_packets_larger_than_a_frame_arrive_whole_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The socket cuts off a peer that sends more at once: the worker was started again."""
    monkeypatch.setattr("slipstream.runner.pair.MAX_FRAME_BYTES", 1 << 16)
    server = ServerChannel()
    worker = WorkerChannel(server.endpoint)
    worker.send([Progress("load", 1, 1)])
    await server.receive()  # the connection is there
    prompt = list(range(2**24, 2**24 + 50_000))
    many = [AddRequest(str(i), [*prompt], SamplingParams(seed=i, max_tokens=1)) for i in range(3)]
    server.send([*many])
    assert worker.receive(10.0) == many  # one packet
    entry = TokenLogprobs(1, -1.0, 1, list(range(20)), [-1.0] * 20)
    output = RequestOutput("a", [1], prompt_logprobs=pack_logprobs([entry] * 2_000))
    worker.send([StepOutputs([output], StepStats())])
    (answer,) = await server.receive()
    assert isinstance(answer, StepOutputs) and answer.outputs == [output]
    worker.close()
    server.close()


async def test_worker_polls_without_waiting(ends: tuple[ServerChannel, WorkerChannel]) -> None:
    assert ends[1].receive(0.0) == []


async def test_idle_worker_wakes_up_for_a_message(
    ends: tuple[ServerChannel, WorkerChannel],
) -> None:
    server, worker = ends
    worker.send([Progress("load", 1, 1)])
    await server.receive()  # the connection is there
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.extend(worker.receive(None)))
    thread.start()
    await asyncio.sleep(0.05)
    assert thread.is_alive()
    server.send([Shutdown()])
    thread.join(2)
    assert got == [Shutdown()]


async def test_idle_worker_wakes_up_for_another_socket(
    ends: tuple[ServerChannel, WorkerChannel], tmp_path: Path
) -> None:
    calls = [Calls(EngineOrders(engine, 2, str(tmp_path))) for engine in range(2)]
    worker = ends[1]
    worker.also_wait_for(calls[0].socket)
    assert worker.receive(0.01) == []
    assert calls[0].heard() is None
    calls[1].send(3)
    calls[1].send(4)
    began = time.monotonic()
    assert worker.receive(20) == []
    assert time.monotonic() - began < 10
    while (heard := calls[0].heard()) != 4:
        assert heard in (None, 3) and time.monotonic() - began < 10
    ends[0].send([Shutdown()])
    assert worker.receive(5) == [Shutdown()]
    for one in calls:
        one.close()


async def test_sending_without_a_peer_neither_blocks_nor_raises() -> None:
    server = ServerChannel()
    server.send([Shutdown()])
    server.close()


async def test_end_of_the_worker_is_noticed() -> None:
    server = ServerChannel()
    worker = WorkerChannel(server.endpoint)
    worker.send([Fatal("last words")])
    worker.close()
    assert await server.receive() == [Fatal("last words")]
    await asyncio.wait_for(server.disconnected(), 2)
    server.close()


async def test_socket_is_private_and_removed() -> None:
    server = ServerChannel()
    folder = Path(server.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.close()
    assert not folder.exists()


async def test_a_long_temporary_folder_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    server = ServerChannel()
    assert len(server.endpoint.removeprefix("ipc://")) < 108
    server.close()
    assert os.listdir(deep) == []
