"""Two nodes on one machine, each with a GPU of its own, give the text of one GPU; one is killed."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.configs.schema import (
    HostsConfig,
    ParallelConfig,
)
from slipstream.server.engine.engine_client import Backoff, EngineClient

from .test_parallel_cuda import alone as alone
from .test_parallel_cuda import compare, submit, text_of
from .test_parallel_cuda import folder as folder
from .two_nodes import configured, lose, on_two_nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@asynccontextmanager
async def two_nodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[EngineClient, subprocess.Popen[bytes]]]:
    """An engine on GPU 0 of this process's node and on GPU 1 of another process's."""
    wanted = configured(folder / "target", ParallelConfig(2))
    async with on_two_nodes(wanted, monkeypatch, "-tp", "2") as (config, executor, second):
        one = replace(config, hosts=HostsConfig())
        client = EngineClient(one, backoff=Backoff(first=0.05), begin=executor.begin_of(0))
        await client.start()
        try:
            yield client, second
        finally:
            await client.shutdown()


async def test_gpus_of_two_nodes_write_the_text_of_one(
    folder: Path, alone: dict[float, dict[int, tuple[list[int], list[float]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async with two_nodes(folder, monkeypatch) as (client, _):
        for temperature, expected in alone.items():
            compare(await text_of(client, temperature), expected)


async def test_a_node_with_a_gpu_that_is_killed_ends_the_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(folder, monkeypatch) as (client, second):
        streams = [submit(client, index, 900) for index in range(4)]
        await anext(aiter(streams[0]))
        await lose(second, streams)
