"""`slipstream serve` in a process of its own, with a fake engine: full disk, speed of the start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("SLIPSTREAM_TEST_ENGINE", "fake_engine:build")


def test_full_disk_behind_its_output_stops_nobody() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-P", "-m", "slipstream.server.commands", "serve"]
    with open("/dev/full", "w") as full:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--access-log"], stdout=full, stderr=full
        )
    try:
        for _ in range(600):
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
                break
            except httpx.TransportError:
                assert server.poll() is None
                time.sleep(0.05)
        assert httpx.get(f"http://127.0.0.1:{port}/nowhere").status_code == 404
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(10) == 0


LIBRARIES = "fastapi, uvicorn, httptools, uvloop, jinja2, prometheus_client, tokenizers, zmq, yaml"


def test_real_server_without_weights_starts_about_as_fast_as_its_libraries_load() -> None:
    """Imports, app, tokenizer and worker process.

    The yardstick is a fresh process that only imports the libraries, so the speed of the machine
    does not matter. It is tried again because the first start compiles modules.
    """
    tries: list[tuple[float, float]] = []  # (processor time, time) of a start, in yardsticks
    for _ in range(6):
        start, imports = _seconds_of_start(), _seconds_of_imports()
        tries.append((start[0] / imports[0], start[1] / imports[1]))
        if min(tries)[0] < 3 and min(elapsed for _, elapsed in tries) < 8:
            return
    raise AssertionError(tries)  # without a fault about 1.7 and 2; importing torch adds 3 to both


def _seconds_of_start() -> tuple[float, float]:
    """Processor time of the server process until it serves, and the time that passed."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream.server.commands", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[3]
        elapsed = time.monotonic() - began
        times = psutil.Process(server.pid).cpu_times()
        assert httpx.get(f"{url}/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
    return times.user + times.system, elapsed


def _seconds_of_imports() -> tuple[float, float]:
    """The same of a process that imports the libraries."""
    began = time.monotonic()
    script = f"import time, {LIBRARIES}; print(time.process_time())"
    seconds = float(subprocess.check_output([sys.executable, "-P", "-c", script]))
    return seconds, time.monotonic() - began
