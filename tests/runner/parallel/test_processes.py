"""Two ranks in processes of their own, under the server's client: tokens, and a rank's death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.runner.messages import AddRequest, SamplingParams
from slipstream.server.engine.engine_client import Backoff, EngineClient, EngineDead, WorkerFailed

from ...speculators.tiny_engine import TinyEngine, save_llama, stated

PROMPTS = [[3, 9, 27, 20], [7, 8]]


def configured(model: Path, size: int = 2) -> Config:
    return Config(
        model=ModelConfig(model=str(model), dtype="float32", device="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=400),
        parallel=ParallelConfig(size),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stated(save_llama(tmp_path_factory.mktemp("model"), layers=2))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(configured(model), backoff=Backoff(first=0.05))
    await client.start()
    yield client
    await client.shutdown()


def submit(client: EngineClient, index: int, max_tokens: int) -> Any:
    sampling = SamplingParams(seed=index, max_tokens=max_tokens, temperature=0.0)
    return client.submit(AddRequest(f"{index}-{time.monotonic()}", PROMPTS[index], sampling))


async def tokens(stream: Any) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


def rank_of(client: EngineClient) -> psutil.Process:
    """The process of rank 1."""
    assert client.worker_pid is not None
    (rank,) = psutil.Process(client.worker_pid).children()
    assert "engine.rank" in rank.cmdline()[-1]
    return rank


async def tokens_of_two(client: EngineClient) -> list[list[int]]:
    return await asyncio.gather(*(tokens(submit(client, i, 20)) for i in range(2)))


@pytest.mark.usefixtures("forked_workers")
async def test_a_rank_that_dies_ends_the_requests_with_one_sentence(
    client: EngineClient, model: Path
) -> None:
    alone = TinyEngine(model, SpeculativeConfig())
    expected = alone.run(PROMPTS, max_tokens=20).tokens
    alone.close()
    assert await tokens_of_two(client) == [expected["0"], expected["1"]]
    rank, worker = rank_of(client), client.worker_pid
    rank.send_signal(signal.SIGTERM)  # as service managers send to all: the server drains first
    stream = submit(client, 0, 120)
    first = await anext(aiter(stream))
    assert first.token_ids == expected["0"][: len(first.token_ids)]
    rank.kill()
    began = time.monotonic()
    with pytest.raises(EngineDead, match="tensor-parallel rank 1 was killed by SIGKILL"):
        await tokens(stream)
        await tokens(submit(client, 0, 120))  # if the first was finished already
        await tokens(submit(client, 0, 120))
    assert time.monotonic() - began < 5
    while worker is not None and psutil.pid_exists(worker):  # until the server has reaped it
        assert time.monotonic() - began < 10
        await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rank 1 is killed", "the worker is killed"])
async def test_the_group_starts_anew_and_leaves_no_process(
    kind: str, client: EngineClient, model: Path
) -> None:
    expected = await tokens_of_two(client)
    pid, rank = client.worker_pid, rank_of(client)
    assert pid is not None
    if kind == "rank 1 is killed":
        rank.kill()  # while no request runs
    else:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 90
    while client.worker_pid in (pid, None) or client.state != "ready":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert await tokens_of_two(client) == expected


@pytest.mark.slow
async def test_a_model_that_cannot_be_divided_is_refused_in_one_sentence(model: Path) -> None:
    client = EngineClient(configured(model, 3))
    with pytest.raises(WorkerFailed, match="4 attention heads cannot be divided among .* 3 ranks"):
        await client.start()
