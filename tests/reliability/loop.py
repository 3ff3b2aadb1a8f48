"""Measures how long large and costly bodies delay the event loop and other streams.

Run `python tests/reliability/loop.py`. It sends each body of `loop_bodies.py` while one client
polls /health, which needs only the server's event loop, and another reads a stream. The lag is the
longest time that /health took (bound: 100 ms). The gap is the longest time between two parts of the
stream (bound: 250 ms).

Other programs on the machine add delays. Three measures exclude these:

- The time for which the threads on a token's path waited for a CPU is subtracted
  (/proc/PID/task/TID/schedstat).
- The lag is at most the CPU time that the server used while /health was open.
- A body that exceeds a bound is sent up to `--tries` times, and the smallest lag and gap count: a
  delay that the body causes would occur each time.

As a control, lag and gap are also measured for ten seconds before the first body and after the
last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from loop_bodies import BODIES  # noqa: E402
from traffic import MODEL, RunningServer  # noqa: E402

MAX_LAG, MAX_GAP = 0.1, 0.25  # seconds
PATIENCE = 15.0  # seconds to wait for an answer, which may be a long text
POLL_SECONDS = 0.005
SETTLE_SECONDS = 0.3  # after an answer, since a delay may come shortly after it
TRIES = 3
CONTROL_SECONDS = 10.0
FLAGS = ("--max-num-seqs", "8")
STREAM = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 480,  # after these, a new stream is opened
    "ignore_eos": True,
    "stream": True,
}


def schedule_of(pid: int, tid: int) -> tuple[float, float]:
    """Seconds for which a thread ran, and for which it waited for a CPU."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):  # the thread has ended, or the system has no such file
        return 0.0, 0.0


def starved(threads: list[tuple[int, int]]) -> float:
    """Seconds for which these (process, thread) pairs waited for a CPU, added up."""
    return sum(schedule_of(pid, tid)[1] for pid, tid in threads)


def busiest_threads(pid: int) -> list[tuple[int, int]]:
    """The main thread of a process and, of the others, the one with the most CPU time."""
    others = [int(task.name) for task in Path(f"/proc/{pid}/task").glob("*")]
    others.remove(pid)
    others.sort(key=lambda tid: schedule_of(pid, tid)[0])
    return [(pid, tid) for tid in (pid, *others[-1:])]


class Worst:
    """Measures intervals and keeps the longest since the last call of `take`.

    With several clocks, an interval's length is the smallest that any of them shows.
    """

    def __init__(self, *clocks: Callable[[], float]) -> None:
        self._clocks = clocks
        self._since = self._now()
        self._worst = 0.0
        self.num_ends = 0

    def begin(self) -> None:
        """Begin an interval."""
        self._since = self._now()

    def _now(self) -> list[float]:
        return [clock() for clock in self._clocks]

    def end(self) -> None:
        """End the interval and begin the next one."""
        now = self._now()
        taken = min(after - before for before, after in zip(self._since, now, strict=True))
        self._worst = max(self._worst, taken)
        self._since = now
        self.num_ends += 1

    def take(self) -> float:
        """The longest interval since the last call; waits for the end of the present one."""
        ends, began = self.num_ends, time.monotonic()
        while self.num_ends < ends + 2:
            assert time.monotonic() < began + 60, "no interval ended for a minute"
            time.sleep(0.005)
        found, self._worst = self._worst, 0.0
        return found


@dataclass(frozen=True)
class Result:
    """The answer to one body and the delays during it, in seconds."""

    name: str
    size: int
    status: int  # 0 if there was no answer in time
    seconds: float
    lag: float
    gap: float

    def __str__(self) -> str:
        late = "  <-- " if self.lag > MAX_LAG or self.gap > MAX_GAP else ""
        return (
            f"{self.name:34} {self.size / 1e6:6.1f} MB  {self.status:3}  {self.seconds:6.2f} s"
            f"  lag {1000 * self.lag:5.0f} ms  gap {1000 * self.gap:5.0f} ms{late}"
        )


def head(path: str, size: int = 0, method: str = "POST") -> bytes:
    """The head of an HTTP request with a body of `size` bytes."""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


def connected(server: RunningServer, timeout: float = 60.0) -> socket.socket:
    """Open a TCP connection to the server."""
    found = socket.create_connection(("127.0.0.1", server.port), timeout)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


class Watch:
    """Polls /health and reads streams in two threads, and measures `lag` and `gap`."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._process = psutil.Process(server.process.pid)
        # A token passes from the worker's step thread through its main thread to the server's.
        self._threads_of_a_token = [
            (server.process.pid, server.process.pid),
            *busiest_threads(server.worker.pid),
        ]
        self.lag = Worst(self._fair_time, self._computed)
        self.gap = Worst(self._fair_time)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=t) for t in (self._poll, self._read)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        self.lag.take(), self.gap.take()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _fair_time(self) -> float:
        own = (os.getpid(), threading.get_native_id())
        return time.monotonic() - starved([own, *self._threads_of_a_token])

    def _computed(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _poll(self) -> None:
        asked = head("/health", method="GET")
        with connected(self._server) as http:
            while not self._stop.is_set():
                self.lag.begin()
                http.sendall(asked)
                http.recv(65536)
                self.lag.end()
                time.sleep(POLL_SECONDS)

    def _read(self) -> None:
        data = json.dumps(STREAM).encode()
        while not self._stop.is_set():
            with connected(self._server) as http:
                http.sendall(head("/v1/completions", len(data)) + data)
                head_part = part = end = http.recv(65536)
                assert b" 200 " in head_part, head_part
                while b"data: " not in part:  # skip the wait for the first token
                    part = http.recv(65536)
                self.gap.begin()
                while part and b"[DONE]" not in end and not self._stop.is_set():
                    part = http.recv(65536)
                    end = (end + part)[-40:]
                    self.gap.end()


def answer(server: RunningServer, path: str, data: bytes, patience: float) -> int:
    """Send a body; returns the status of the answer, or 0 without one after `patience` seconds."""
    with connected(server, patience) as http:
        try:
            http.sendall(head(path, len(data)) + data)
            return int(http.recv(65536).split(b" ", 2)[1])
        except (TimeoutError, ConnectionError, IndexError):
            return (
                0  # the server may reject a body that is too large before it has received all of it
            )


def measure(server: RunningServer, watch: Watch, name: str, patience: float) -> Result:
    """Send a body once and measure lag and gap meanwhile."""
    path, make = BODIES[name]
    data = make()
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    watch.lag.take(), watch.gap.take()
    began = time.monotonic()
    status = answer(server, path, data, patience)
    seconds = time.monotonic() - began
    time.sleep(SETTLE_SECONDS)
    return Result(name, len(data), status, seconds, watch.lag.take(), watch.gap.take())


def show_control(watch: Watch, seconds: float) -> None:
    """Print lag and gap while no body is sent."""
    watch.lag.take(), watch.gap.take()
    time.sleep(seconds)
    lag, gap = watch.lag.take(), watch.gap.take()
    print(
        f"control: lag {1000 * lag:.0f} ms, gap {1000 * gap:.0f} ms in {seconds:.0f} s", flush=True
    )


def run(
    server: RunningServer,
    names: list[str],
    max_lag: float = MAX_LAG,
    max_gap: float = MAX_GAP,
    tries: int = TRIES,
    control_seconds: float = 0.0,
    patience: float = PATIENCE,
) -> list[str]:
    """Send the named bodies; returns the results that exceed a bound or have a 5xx status."""
    faults = []
    with Watch(server) as watch:
        if control_seconds:
            show_control(watch, control_seconds)
        for name in names:
            lags, gaps = [], []
            for _ in range(tries):
                result = measure(server, watch, name, patience)
                print(result, flush=True)
                lags.append(result.lag)
                gaps.append(result.gap)
                if result.status >= 500 or (min(lags) <= max_lag and min(gaps) <= max_gap):
                    break
            if result.status >= 500 or min(lags) > max_lag or min(gaps) > max_gap:
                faults.append(str(result))
        if control_seconds:
            show_control(watch, control_seconds)
    return faults


def main() -> int:
    """Send all bodies to a server of their own; returns 0 if there were no faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="bodies whose names contain this")
    parser.add_argument("--max-lag", type=float, default=MAX_LAG, help="seconds (default: 0.1)")
    parser.add_argument("--max-gap", type=float, default=MAX_GAP, help="seconds (default: 0.25)")
    parser.add_argument(
        "--tries", type=int, default=TRIES, help="times a body is sent (default: 3)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="seconds to wait for an answer (default: 15)",
    )
    options = parser.parse_args()
    server = RunningServer(*FLAGS).wait_ready()
    try:
        names = [name for name in BODIES if options.only in name]
        bounds = (options.max_lag, options.max_gap, options.tries)
        faults = run(server, names, *bounds, CONTROL_SECONDS, options.patience)
    finally:
        status = server.stop()
    print(f"{len(faults)} of {len(names)} bodies exceeded a bound" if faults else "no faults")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
