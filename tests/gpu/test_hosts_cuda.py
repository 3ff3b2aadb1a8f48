"""Two nodes on one machine, each with a GPU of its own, give the text of one GPU; one is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    HostsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from slipstream.server.engine.engine_client import Backoff, EngineClient, EngineDead
from slipstream.server.hosts.executor import HostsExecutor

from ..end_to_end.running_server import free_port
from .test_parallel_cuda import alone as alone
from .test_parallel_cuda import compare, submit, text_of
from .test_parallel_cuda import folder as folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
SECRET = "a secret of the nodes"


@asynccontextmanager
async def two_nodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[EngineClient, subprocess.Popen[bytes]]]:
    """An engine on GPU 0 of this process's node and on GPU 1 of another process's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    hosts = HostsConfig(nnodes=2, group_key=SECRET, master_port=free_port())
    config = Config(
        model=ModelConfig(model=str(folder / "target"), dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        cache=CacheConfig(kv_cache_memory_bytes=256 << 20),
        parallel=ParallelConfig(2),
        server=ServerConfig(worker_timeout=30),
        hosts=hosts,
    )
    flags = ("-tp", "2", "--nnodes", "2", "--node-rank", "1")
    second = subprocess.Popen(
        [sys.executable, "-m", "slipstream.server.commands", "serve", config.model.model, *flags,
         "--master-port", str(hosts.master_port)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1", "SLIPSTREAM_GROUP_KEY": SECRET},
    )  # fmt: skip
    try:
        async with HostsExecutor(config, print) as executor:
            begin = executor.begin_of(0)
            one = replace(config, hosts=HostsConfig())
            client = EngineClient(one, backoff=Backoff(first=0.05), begin=begin)
            await client.start()
            try:
                yield client, second
            finally:
                await client.shutdown()
        if second.returncode is None:
            assert await asyncio.to_thread(second.wait, 20) == 0
    finally:
        if second.poll() is None:
            second.kill()
            second.wait()


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
        second.kill()
        second.wait()
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDead, match=r"node 1 \(127.0.0.1\) is gone"):
                async for _ in stream:
                    pass
        assert time.monotonic() - began < 10
