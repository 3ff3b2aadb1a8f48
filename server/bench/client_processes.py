"""Sends the load of `slipstream bench serve` from several processes.

One Python process reads some 50,000 chunks per second of CPU time, but a chunk waits while it reads
others, which would be measured as the server's latency. Each of N processes sends every N-th
request and gets an equal share of the concurrency.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from .load import BenchRequest
from .serve import Outcome, Target, run_load
from .stream_client import StreamClient

BOTTLENECK_SHARE = 0.9  # share of a core beyond which a client process may have added latency
_MAX_DEFAULT = 8
_POLL_SECONDS = 0.2
_HEAD_START_SECONDS = 0.05  # delay of the common start, so that every process has received it
Pipe = Any  # multiprocessing.connection.Connection, which typeshed makes generic


@dataclass(frozen=True)
class Load:
    """The requests to send, and when to send them."""

    target: Target
    requests: Sequence[BenchRequest]
    due: Sequence[float]  # seconds from the start, for each of `requests`
    max_concurrency: int | None  # None: requests are sent when they are due
    timeout: float  # seconds without data after which a request fails

    def part(self, index: int, count: int) -> Load:
        """The part of the load that process `index` of `count` sends."""
        most = self.max_concurrency
        if most is not None:
            most = most // count + (index < most % count)
        requests, due = self.requests[index::count], self.due[index::count]
        return replace(self, requests=requests, due=due, max_concurrency=most)


@dataclass(frozen=True)
class Measured:
    """The outcomes of a load and the client's use of the CPU."""

    outcomes: list[Outcome]
    seconds: float  # from the start to the end of the last request
    cpu_share: float  # share of a core that the busiest client process used


def default_processes(num_requests: int, max_concurrency: int | None) -> int:
    """The number of client processes: one per two cores and per 16 open requests, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_once = min(num_requests, max_concurrency or num_requests)
    return max(1, min(_MAX_DEFAULT, (cores or 1) // 2, at_once // 16))


async def send(
    load: Load, tick: Callable[[], object], begin: Callable[[], float] = time.perf_counter
) -> Measured:
    """Send the load from this process; calls `tick` after each reply.

    `begin` is called when the process is ready, and returns the start as a `time.perf_counter`."""
    async with StreamClient(load.target.url, load.target.headers, load.timeout) as client:
        began = begin()
        cpu = time.process_time()
        outcomes, seconds = await run_load(
            client, load.target, load.requests, load.due, load.max_concurrency, tick, began
        )
        cpu = time.process_time() - cpu
    return Measured(outcomes, seconds, cpu / seconds)


def send_from(count: int, load: Load, tick: Callable[[], object]) -> Measured:
    """Send the load from `count` processes, which start at the same moment.

    Calls `tick` once per request that has ended. Raises RuntimeError if a process dies.
    """
    if load.max_concurrency is not None:
        count = min(count, load.max_concurrency)
    if count <= 1:
        return _run(send(load, tick))
    context = multiprocessing.get_context("spawn")  # threads of the parent may hold locks
    done = context.Value("q", 0)  # requests that have ended, in all processes
    clients: list[tuple[Any, Pipe]] = []  # (process, pipe)
    try:
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_client, args=(load.part(index, count), done, theirs), daemon=True
            )
            process.start()
            theirs.close()
            clients.append((process, ours))
        pipes = [pipe for _, pipe in clients]
        for pipe in pipes:
            pipe.recv()  # the process is ready
        began = time.perf_counter() + _HEAD_START_SECONDS
        for pipe in pipes:
            pipe.send(began)
        return _collect(pipes, done, tick)
    except (EOFError, OSError) as error:
        raise RuntimeError("a client process died before its requests ended") from error
    finally:
        for process, pipe in clients:
            process.kill()
            process.join()
            pipe.close()


def _client(load: Load, done: Any, pipe: Pipe) -> None:
    """Main function of a client process: report ready, receive the start, send the load."""

    def tick() -> None:
        with done.get_lock():
            done.value += 1

    def begin() -> float:
        pipe.send(None)
        return float(pipe.recv())

    pipe.send(_run(send(load, tick, begin)))


def _run(sending: Coroutine[Any, Any, Measured]) -> Measured:
    """Run in uvloop where it is installed, because a chunk costs less there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(sending)
    return uvloop.run(sending)


def _collect(pipes: Sequence[Pipe], done: Any, tick: Callable[[], object]) -> Measured:
    """Wait for all processes and join their results, calling `tick` meanwhile."""
    found: dict[int, Measured] = {}
    num_ticks = 0
    while len(found) < len(pipes):
        waiting = [pipe for place, pipe in enumerate(pipes) if place not in found]
        ready = wait(waiting, _POLL_SECONDS)
        found |= {place: pipe.recv() for place, pipe in enumerate(pipes) if pipe in ready}
        for _ in range(done.value - num_ticks):
            tick()
            num_ticks += 1
    parts = [found[place] for place in range(len(pipes))]
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    seconds = max(part.seconds for part in parts)
    return Measured(outcomes, seconds, max(part.cpu_share for part in parts))
