"""Two engines on two GPUs share their experts: the text of one, on one node or two, and a death.

`parallel.sh OUT PYTHON SECONDS engines` runs these tests and 1,000 random steps of DeepSeek V3's
shape. Its part `groups` runs whole steps, two nodes and sums of a group of its own; `groups4` needs
four GPUs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs.schema import (
    GraphConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from slipstream.server.engine.engine_client import EngineDead
from slipstream.server.engine.engines import Engines, create_engine

from .test_parallel_cuda import DRAFTER, EXPERTS, compare, save_weights, submit, text_of
from .two_nodes import configured, lose, on_two_nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    for name, config in (("drafter", DRAFTER), ("experts", EXPERTS)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    save_weights(EXPERTS, folder / "experts")
    return folder


@asynccontextmanager
async def served(folder: Path, engines: int, ranks: int = 1, **changes: Any) -> AsyncIterator[Any]:
    parallel = ParallelConfig(ranks, engines, enable_expert_parallel=engines > 1)
    parallel = changes.pop("parallel", parallel)
    client = create_engine(configured(folder / "experts", parallel, **changes))
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()


def speculative(folder: Path) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="eagle3",
        model=str(folder / "drafter"),
        load_format="dummy",
        num_speculative_tokens=3,
    )


@pytest.mark.parametrize("mode", ["graphs", "forward", "eager", "drafts"])
async def test_two_engines_write_the_text_of_one(mode: str, folder: Path) -> None:
    async with served(folder, 1) as client:
        expected = await text_of(client)
    changes: dict[str, Any] = {}
    if mode == "eager":
        changes = {"graph": GraphConfig(enforce_eager=True)}
    elif mode == "forward":
        changes = {"graph": GraphConfig(cudagraph_whole_step=False)}
    elif mode == "drafts":
        changes = {"speculative": speculative(folder)}
    async with served(folder, 2, **changes) as engines:
        for _ in range(2):
            compare(await text_of(engines), expected)
            compare(await text_of(engines, logprobs=None), expected)  # sampled in graphs
        stream = submit(engines, 3, 40)  # beside an idle engine
        ids = [token async for output in stream for token in output.token_ids]
        assert ids[:20] == expected[3][0][:20]


async def test_a_killed_engine_ends_requests_and_the_group_starts_anew(folder: Path) -> None:
    async with served(folder, 2) as engines:
        assert isinstance(engines, Engines)
        expected = await text_of(engines)
        before = [client.worker_pid for client in engines.clients]
        streams = [submit(engines, index, 900) for index in range(2)]
        for stream in streams:
            await anext(aiter(stream))
        assert before[1] is not None
        os.kill(before[1], signal.SIGKILL)
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDead, match="data-parallel rank 1 was killed by SIGKILL"):
                async for _ in stream:
                    pass
        print(f"noticed after {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < 6
        while any(
            client.state != "ready" or client.worker_pid in (None, pid)
            for client, pid in zip(engines.clients, before, strict=True)
        ):
            assert time.monotonic() - began < 100
            await asyncio.sleep(0.1)
        print(f"ready again after {time.monotonic() - began:.1f} s")
        compare(await text_of(engines), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA GPUs")
@pytest.mark.parametrize("sums", ["shared", "nccl"])
async def test_two_engines_of_two_gpus_write_the_text_of_one(sums: str, folder: Path) -> None:
    async with served(folder, 1) as client:
        expected = await text_of(client)
    parallel = ParallelConfig(
        2, 2, enable_expert_parallel=True, disable_custom_all_reduce=sums == "nccl"
    )
    changes = {"parallel": parallel, "speculative": speculative(folder)}
    async with served(folder, 2, **changes) as engines:
        compare(await text_of(engines), expected)
        compare(await text_of(engines, logprobs=None), expected)


async def test_engines_on_two_nodes_write_the_text_of_one_and_a_lost_node_ends_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(folder, 1) as client:
        expected = await text_of(client)
    config = configured(folder / "experts", ParallelConfig(1, 2, enable_expert_parallel=True))
    flags = ("-dp", "2", "--enable-expert-parallel")
    async with on_two_nodes(config, monkeypatch, *flags) as (config, executor, second):
        engines = create_engine(config, begin_of=executor.begin_of)
        await engines.start()
        try:
            compare(await text_of(engines), expected)
            compare(await text_of(engines, logprobs=None), expected)
            streams = [submit(engines, index, 900) for index in range(2)]
            for stream in streams:
                await anext(aiter(stream))
            await lose(second, streams)
        finally:
            await engines.shutdown()
