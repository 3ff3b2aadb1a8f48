"""Two nodes in network namespaces, as on two hosts: addresses, and a cable that is pulled."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .running_server import environment, slipstream
from .test_hosts import FLAGS, SECRET, body, expected
from .test_hosts import model as model

pytestmark = pytest.mark.slow
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> bool:
    """Whether a command of `ip` succeeds."""
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


def within(name: str, *command: str) -> str:
    """What a command in a namespace prints."""
    whole = ["ip", "netns", "exec", name, *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """Two namespaces that a cable joins."""
    names = f"slip{os.getpid()}a", f"slip{os.getpid()}b"
    if not (shutil.which("ip") and shutil.which("ss") and shutil.which("curl")):
        pytest.skip("needs ip, ss and curl")
    if not all(ip("netns", "add", name) for name in names):
        pytest.skip("may not create network namespaces")
    ends = [f"v{name}"[-15:] for name in names]
    assert ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        assert ip("link", "set", end, "netns", name)
        assert ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        assert ip("-n", name, "link", "set", end, "up") and ip(
            "-n", name, "link", "set", "lo", "up"
        )
    yield names
    for name in names:
        ip("netns", "del", name)


def until(condition: object, path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not re.search(str(condition), path.read_text()):
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.2)


def test_hosts_listen_on_their_own_address_and_notice_a_cable_that_is_pulled(
    networks: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    group = ("--nnodes", "2", "-tp", "2", "--master-addr", ADDRESSES[0])
    logs = [tmp_path / "node0", tmp_path / "node1"]
    nodes = []
    for rank, (name, log) in enumerate(zip(networks, logs, strict=True)):
        flags = ("--port", "8000") if rank == 0 else ("--node-rank", "1")
        command = ["ip", "netns", "exec", name, slipstream(), "serve", str(model), *FLAGS, *group]
        with log.open("w") as file:
            nodes.append(
                subprocess.Popen(
                    [*command, *flags], stdout=file, stderr=subprocess.STDOUT,
                    env={**environment(), "SLIPSTREAM_GROUP_KEY": SECRET},
                )
            )  # fmt: skip
    try:
        until("Serving m at", logs[0], 240)
        url = "http://127.0.0.1:8000"
        sent = ("-H", "content-type: application/json", "-d", json.dumps(body(12)))
        answer = json.loads(within(networks[0], "curl", "-s", f"{url}/v1/chat/completions", *sent))
        assert answer["choices"][0]["message"]["content"] == expected(model)
        for name, address in zip(networks, ADDRESSES, strict=True):
            listening = [line.split()[3] for line in within(name, "ss", "-Hltn").splitlines()]
            others = [where for where in listening if where != "127.0.0.1:8000"]
            assert others and all(where.startswith(f"{address}:") for where in others)
        assert ip("-n", networks[1], "link", "set", f"v{networks[1]}"[-15:], "down")
        until(r"node 1 \(10.77.0.2\) is gone; starting", logs[0], 60)
        assert nodes[1].wait(60) == 1
        until("node 0 at 10.77.0.1:29501 is gone, so this node ends", logs[1], 5)
        nodes[0].terminate()
        assert nodes[0].wait(30) == 0
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
                node.wait()
