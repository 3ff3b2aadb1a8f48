"""Two nodes on one machine, each with a GPU of its own, and the loss of the second."""

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
from typing import Any

import pytest

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    HostsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from slipstream.server.engine.engine_client import EngineDead
from slipstream.server.hosts.executor import HostsExecutor

from ..end_to_end.running_server import free_port

SECRET = "a secret of the nodes"


def configured(model: Path, parallel: ParallelConfig, /, **changes: Any) -> Config:
    """The configuration of tests on several GPUs for a model folder."""
    config = Config(
        model=ModelConfig(model=str(model), dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        cache=CacheConfig(kv_cache_memory_bytes=256 << 20),
        parallel=parallel,
        server=ServerConfig(worker_timeout=30),
    )
    return replace(config, **changes)


@asynccontextmanager
async def on_two_nodes(
    config: Config, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> AsyncIterator[tuple[Config, HostsExecutor, subprocess.Popen[bytes]]]:
    """The config of GPU 0 on this process's node, its processes, and a node of GPU 1, which gets
    the `flags`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    hosts = HostsConfig(nnodes=2, group_key=SECRET, master_port=free_port())
    config = replace(config, hosts=hosts)
    second = subprocess.Popen(
        [sys.executable, "-m", "slipstream.server.commands", "serve", config.model.model, *flags,
         "--nnodes", "2", "--node-rank", "1", "--master-port", str(hosts.master_port)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1", "SLIPSTREAM_GROUP_KEY": SECRET},
    )  # fmt: skip
    try:
        async with HostsExecutor(config, print) as executor:
            yield config, executor, second
        if second.returncode is None:
            assert await asyncio.to_thread(second.wait, 20) == 0
    finally:
        if second.poll() is None:
            second.kill()
            second.wait()


async def lose(second: subprocess.Popen[bytes], streams: list[Any]) -> None:
    """Kill the second node, whose loss must end all streams within ten seconds."""
    second.kill()
    second.wait()
    began = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineDead, match=r"node 1 \(127.0.0.1\) is gone"):
            async for _ in stream:
                pass
    assert time.monotonic() - began < 10
