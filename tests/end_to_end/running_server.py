"""Starts a real server in a child process, as a user does, and reads its log and metrics."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

START_SECONDS = 120
WORKER = "slipstream.runner.engine.worker"  # in the command line of a worker


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Serving:
    """`slipstream serve` in a child process; `log` holds the lines that it has written."""

    def __init__(self, *flags: str) -> None:
        command = [slipstream(), "serve", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.log.extend(lines)

    def wait(self, seconds: float = 20) -> int:
        """Its exit status, when `log` is complete."""
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status


class RunningServer(Serving):
    """A server at a port of this machine."""

    def __init__(self, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__("--port", str(self.port), *flags)

    def wait_ready(self, seconds: float = START_SECONDS) -> RunningServer:
        """Wait until /ready answers 200.

        Raises AssertionError with the log if the server exits or is not ready after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "".join(self.log)
            try:
                if httpx.get(f"{self.url}/ready", timeout=2).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError("the server was not ready in time:\n" + "".join(self.log))

    def descendants(self) -> list[psutil.Process]:
        """The server's child processes and their descendants."""
        return psutil.Process(self.process.pid).children(recursive=True)

    @staticmethod
    def is_alive(process: psutil.Process) -> bool:
        """Whether a process exists and is not a zombie."""
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 40) -> int:
        """Send `sig` to the server and return its exit status.

        If it has not exited after `seconds`, kill it and raise TimeoutExpired."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def drain(self, sig: int, max_tokens: int = 40) -> int:
        """Send `sig` while a stream is open, check that the stream completes, and return the exit
        status."""
        body = {
            "model": "smollm2-135m", "prompt": "Count to ten:", "temperature": 0,
            "max_tokens": max_tokens, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            self.process.send_signal(sig)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        return self.process.wait(20)

    @property
    def worker(self) -> psutil.Process:
        """The worker process."""
        workers = [each for each in self.descendants() if WORKER in each.cmdline()]
        return max(workers, key=lambda process: process.memory_info().rss)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of a metric that have these labels; 0.0 without samples."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            match = re.fullmatch(r"([a-z_:0-9]+)(?:\{(.*)\})? (\S+)", line)
            if match is None or match[1] != f"slipstream:{name}":
                continue
            found = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if labels.items() <= found.items():
                total += float(match[3])
        return total


def slipstream() -> str:
    """The path of the `slipstream` command in the environment of the tests."""
    return str(Path(sys.executable).with_name("slipstream"))


def environment() -> dict[str, str]:
    """The environment variables of the tests without those that select Triton's interpreter."""
    hidden = {"TRITON_INTERPRET", "SLIPSTREAM_TRITON"}
    return {key: value for key, value in os.environ.items() if key not in hidden}
