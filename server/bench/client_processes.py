"""Sends the load of `slipstream bench serve` from several processes.

One Python process reads a few thousand chunks a second. A faster server would measure its client;
with several processes it measures itself. Each of N processes sends every N-th request and holds
an equal share of the concurrency.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import httpx

from .load import BenchRequest
from .serve import Outcome, Target, run_load

BOTTLENECK_SHARE = 0.9  # of a core: a client process that used more may have delayed what it saw
_MAX_DEFAULT = 8
_POLL_SECONDS = 0.2
_HEAD_START_SECONDS = 0.05  # from the message to the moment at which all processes begin
Pipe = Any  # multiprocessing.connection.Connection, which typeshed makes generic


@dataclass(frozen=True)
class Load:
    """What is sent, and when."""

    target: Target
    requests: Sequence[BenchRequest]
    due: Sequence[float]  # seconds from the start, for each of `requests`
    max_concurrency: int | None  # None: requests are sent when they are due
    timeout: float  # seconds without a byte

    def part(self, index: int, count: int) -> Load:
        """The part of process `index` of `count`."""
        most = self.max_concurrency
        if most is not None:
            most = most // count + (index < most % count)
        requests, due = self.requests[index::count], self.due[index::count]
        return replace(self, requests=requests, due=due, max_concurrency=most)


@dataclass(frozen=True)
class Measured:
    """The outcomes of a load."""

    outcomes: list[Outcome]
    seconds: float  # from the start to the end of the last request
    cpu_share: float  # of a core, in the busiest client process


def default_processes(num_requests: int, max_concurrency: int | None) -> int:
    """One process for every two cores, at most 8; fewer for a load that one process can send."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_once = min(num_requests, max_concurrency or num_requests)
    return max(1, min(_MAX_DEFAULT, (cores or 1) // 2, at_once // 16))


async def send(
    load: Load, tick: Callable[[], object], begin: Callable[[], float] = time.perf_counter
) -> Measured:
    """Send the load from this process. `begin` is called once all is ready; it returns the start,
    by `time.perf_counter`."""
    no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=no_limit, timeout=load.timeout) as client:
        began = begin()
        cpu, start = time.process_time(), time.perf_counter()
        outcomes, seconds = await run_load(
            client, load.target, load.requests, load.due, load.max_concurrency, tick, began
        )
        cpu, start = time.process_time() - cpu, time.perf_counter() - start
    return Measured(outcomes, seconds, cpu / max(start, 1e-9))


def send_from(count: int, load: Load, tick: Callable[[], object]) -> Measured:
    """Send the load from `count` processes; RuntimeError if one of them dies.

    `tick` is called for each request that ended. All processes begin at the same moment.
    """
    if load.max_concurrency is not None:
        count = min(count, load.max_concurrency)
    if count <= 1:
        return asyncio.run(send(load, tick))
    context = multiprocessing.get_context("spawn")  # threads of the parent may hold locks
    done = context.Value("q", 0)  # requests that ended, in all processes
    clients: list[tuple[Any, Pipe]] = []  # process and pipe
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
            pipe.recv()  # it is ready
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
    """A client process: reports that it is ready, receives the start, sends its part."""

    def tick() -> None:
        with done.get_lock():
            done.value += 1

    def begin() -> float:
        pipe.send(None)
        return float(pipe.recv())

    pipe.send(asyncio.run(send(load, tick, begin)))


def _collect(pipes: Sequence[Pipe], done: Any, tick: Callable[[], object]) -> Measured:
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
