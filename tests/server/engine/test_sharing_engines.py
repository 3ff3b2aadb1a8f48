"""Two engines that share their experts, in processes of their own: texts, deaths and the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
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
from slipstream.server.engine.engine_client import EngineDead, WorkerFailed
from slipstream.server.engine.engines import Engines, create_engine

from ...speculators.mtp_oracle import MtpOracle
from ...speculators.tiny_engine import TinyEngine, prompts, save_llama

TOKENS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "target"
    MtpOracle(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    alone = TinyEngine(model, SpeculativeConfig())
    found = alone.run(prompts(6), max_tokens=TOKENS).tokens
    alone.close()
    return [found[str(index)] for index in range(6)]


def configured(model: Path, ranks: int = 1) -> Config:
    return Config(
        model=ModelConfig(model=str(model), dtype="float32", device="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=400),
        speculative=SpeculativeConfig(method="mtp", num_speculative_tokens=2),
        parallel=ParallelConfig(ranks, 2, enable_expert_parallel=True),
    )


async def started(config: Config) -> Engines:
    engines = create_engine(config)
    assert isinstance(engines, Engines)
    await engines.start()
    return engines


def submit(engines: Engines, index: int, max_tokens: int = TOKENS) -> Any:
    sampling = SamplingParams(seed=index, max_tokens=max_tokens, temperature=0.0)
    request = AddRequest(f"{index}-{time.monotonic()}", prompts(6)[index], sampling)
    return engines.submit(request)


async def tokens(stream: Any) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def texts(engines: Engines) -> list[list[int]]:
    return await asyncio.gather(*(tokens(submit(engines, index)) for index in range(6)))


def pids(engines: Engines) -> list[int]:
    found = [client.worker_pid for client in engines.clients]
    assert None not in found
    return [pid for pid in found if pid is not None]


@pytest.mark.usefixtures("forked_workers")
async def test_texts_a_termination_and_a_death(model: Path, expected: list[list[int]]) -> None:
    engines = await started(configured(model))
    try:
        assert await texts(engines) == expected
        assert await tokens(submit(engines, 0)) == expected[0]  # the other one only helps
        for pid in pids(engines):  # as service managers do, before the server drains
            os.kill(pid, signal.SIGTERM)
        streams = [submit(engines, index) for index in range(3)]
        assert {stream.engine for stream in streams} == {0, 1}
        assert await asyncio.gather(*map(tokens, streams)) == expected[:3]
        streams = [submit(engines, 0, 110), submit(engines, 1, 110)]
        assert {stream.engine for stream in streams} == {0, 1}
        for stream in streams:
            await anext(aiter(stream))
        began, workers = time.monotonic(), pids(engines)
        os.kill(workers[1], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match="data-parallel rank 1 was killed by SIGKILL"):
                await tokens(stream)
        while any(map(psutil.pid_exists, workers)):
            assert time.monotonic() - began < 20
            await asyncio.sleep(0.02)
    finally:
        await engines.shutdown(grace=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_group_starts_anew(ranks: int, model: Path, expected: list[list[int]]) -> None:
    engines = await started(configured(model, ranks))
    try:
        assert await texts(engines) == expected
        before = pids(engines)
        victim = psutil.Process(before[1])
        if ranks == 2:
            (victim,) = victim.children()
        victim.kill()
        deadline = time.monotonic() + 120
        while engines.clients[0].worker_pid in (before[0], None) or any(
            client.state != "ready" for client in engines.clients
        ):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert await texts(engines) == expected
    finally:
        await engines.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_all_to_all_gives_the_same_texts(
    ranks: int, model: Path, expected: list[list[int]]
) -> None:
    config = configured(model, ranks)
    parallel = replace(config.parallel, all2all_backend="all_to_all")
    engines = await started(replace(config, parallel=parallel))
    try:
        assert await texts(engines) == expected
        assert await tokens(submit(engines, 0)) == expected[0]  # the other one only helps
    finally:
        await engines.shutdown()


@pytest.mark.slow
async def test_the_end_of_the_server_waits_for_open_requests(
    model: Path, expected: list[list[int]]
) -> None:
    engines = await started(configured(model))
    streams = [submit(engines, index) for index in range(3)]
    found = asyncio.gather(*map(tokens, streams))
    workers = pids(engines)
    began = time.monotonic()
    await engines.shutdown(drain_timeout=60)
    assert await found == expected[:3]
    assert not any(map(psutil.pid_exists, workers))
    assert time.monotonic() - began < 30


@pytest.mark.slow
async def test_a_model_without_experts_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model", layers=2)
    config = replace(configured(folder), speculative=SpeculativeConfig())
    with pytest.raises(WorkerFailed, match="^--enable-expert-parallel needs a model with experts"):
        await started(config)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--no-expert-parallel",)], ids=["shared", "apart"])
def test_a_thousand_random_steps_hang_no_request(flags: tuple[str, ...], model: Path) -> None:
    """Requests arrive, end and are aborted at random; the script fails if one is silent."""
    script = Path(__file__).parents[2] / "lab" / "engine_group.py"
    done = subprocess.run(
        [sys.executable, str(script), str(model), "--device", "cpu", "--load-format", "auto",
         "--batch", "8", "--output-len", "12", "--max-model-len", "128", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert min(found["steps"]) >= 1000 and found["aborted"] > 10
