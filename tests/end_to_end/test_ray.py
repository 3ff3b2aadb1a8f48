"""A Ray cluster of two nodes on this machine serves a model on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .running_server import RunningServer, environment, slipstream
from .test_hosts import FLAGS, chat, expected, stream_until_error
from .test_hosts import experts as experts
from .test_hosts import model as model

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")

FLAGS_OF_RAY = ("--distributed-executor-backend", "ray", "-tp", "2", "--device", "cpu")
SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each, as Ray counts them."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray would report its use to its makers
    from ray.cluster_utils import Cluster

    head = {**SMALL, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.second = cluster.add_node(**SMALL)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture
def server(cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    server = RunningServer(str(model), *FLAGS, *FLAGS_OF_RAY)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait(10)


def ranks() -> list[psutil.Process]:
    """The processes of ranks and workers on this machine whose parents are actors."""
    found = []
    for process in psutil.process_iter():
        try:
            parent = process.parent()
            if "engine." in " ".join(process.cmdline()[-1:]) and parent is not None:
                if "ray" in parent.name() or "Actor" in " ".join(parent.cmdline()):
                    found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def until(condition: Any, log: list[str], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "".join(log)
        time.sleep(0.1)


def test_two_nodes_of_a_ray_cluster_serve_a_chat(
    server: RunningServer, model: Path, cluster: Any
) -> None:
    server.wait_ready(200)
    assert chat(server) == expected(model)
    assert len(ranks()) == 2
    # One accelerator a rank, and so one rank a node: actors are children of their node's raylet.
    actors = [process.parent() for process in ranks()]
    assert len({actor.ppid() for actor in actors if actor is not None}) == 2
    assert server.stop() == 0
    assert not ranks()
    log = "".join(server.log)
    for rank in range(2):  # Ray names the rank in front of each of its lines
        assert f"(rank {rank} pid=" in log, log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_node_that_ray_loses_ends_the_requests_and_another_takes_its_place(
    server: RunningServer, model: Path, cluster: Any
) -> None:
    server.wait_ready(200)
    error, seconds = stream_until_error(
        server, lambda: cluster.remove_node(cluster.second, allow_graceful=False)
    )
    assert re.search(r"node [12] \(.*\) is gone", error), error
    assert seconds < 30
    cluster.second = cluster.add_node(**SMALL)
    until(lambda: any("ready again" in line for line in server.log), server.log, 120)
    assert chat(server) == expected(model)
    assert server.stop() == 0


@pytest.mark.slow
def test_engines_that_ray_places_share_experts(
    cluster: Any, experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    flags = ("--distributed-executor-backend", "ray", "--device", "cpu")
    server = RunningServer(str(experts), *FLAGS, *flags, "-dp", "2", "--enable-expert-parallel")
    try:
        server.wait_ready(240)
        assert [chat(server) for _ in range(3)] == [expected(experts)] * 3
        assert len(ranks()) == 2
        for engine in range(2):
            assert any(f"(engine {engine} rank 0 pid=" in line for line in server.log), server.log
        assert server.stop() == 0
        assert not ranks()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(10)


def refusal(*flags: str) -> str:
    """What `slipstream serve` says when it does not start."""
    command = [slipstream(), "serve", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_named(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (str(model), *FLAGS, "--port", "0", "--distributed-executor-backend", "ray")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    said = refusal(*flags, "-tp", "4")
    assert "the Ray cluster has 2 CPUs, but" in said and said.endswith("needs 4")
