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
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    HostsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
)
from slipstream.server.engine.engine_client import EngineDead
from slipstream.server.engine.engines import Engines, create_engine
from slipstream.server.hosts.executor import HostsExecutor

from ..end_to_end.running_server import free_port
from .test_parallel_cuda import DRAFTER, EXPERTS, compare, save_weights, submit, text_of

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


def configured(folder: Path, engines: int, ranks: int = 1, **changes: Any) -> Config:
    config = Config(
        model=ModelConfig(model=str(folder / "experts"), dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        cache=CacheConfig(kv_cache_memory_bytes=256 << 20),
        parallel=ParallelConfig(ranks, engines, enable_expert_parallel=engines > 1),
        server=ServerConfig(worker_timeout=30),
    )
    return replace(config, **changes)


@asynccontextmanager
async def served(folder: Path, engines: int, ranks: int = 1, **changes: Any) -> AsyncIterator[Any]:
    client = create_engine(configured(folder, engines, ranks, **changes))
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


@asynccontextmanager
async def on_two_nodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, subprocess.Popen[bytes]]]:
    """Engines on GPU 0 of this process's node and on GPU 1 of another process's."""
    secret, port = "a secret of the nodes", free_port()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    hosts = HostsConfig(nnodes=2, group_key=secret, master_port=port)
    config = configured(folder, 2, hosts=hosts)
    flags = ("-dp", "2", "--enable-expert-parallel", "--nnodes", "2", "--node-rank", "1")
    second = subprocess.Popen(
        [sys.executable, "-m", "slipstream.server.commands", "serve", config.model.model, *flags,
         "--master-port", str(port)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1", "SLIPSTREAM_GROUP_KEY": secret},
    )  # fmt: skip
    try:
        async with HostsExecutor(config, print) as executor:
            engines = create_engine(config, begin_of=executor.begin_of)
            await engines.start()
            try:
                yield engines, second
            finally:
                await engines.shutdown()
    finally:
        if second.poll() is None:
            second.kill()
        second.wait()


async def test_engines_on_two_nodes_write_the_text_of_one_and_a_lost_node_ends_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(folder, 1) as client:
        expected = await text_of(client)
    async with on_two_nodes(folder, monkeypatch) as (engines, second):
        compare(await text_of(engines), expected)
        compare(await text_of(engines, logprobs=None), expected)
        streams = [submit(engines, index, 900) for index in range(2)]
        for stream in streams:
            await anext(aiter(stream))
        second.kill()
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDead, match=r"node 1 \(127.0.0.1\) is gone"):
                async for _ in stream:
                    pass
        assert time.monotonic() - began < 10
