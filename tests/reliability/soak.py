"""Keep a live server under mixed load with aborts, and look whether anything grows.

`python tests/reliability/soak.py --requests 3000` (or `--minutes 30`). From time to time the load
pauses: then no row and no block may be taken. What server and worker hold (memory, file
descriptors, threads) is measured in the pauses, and compared between the first pause after the
warm-up, which is a third of the load, and the last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from traffic import RunningServer, at_rest, mixed_request, send  # noqa: E402

# Allocators keep some of what they were once given, so a process may grow by so much and no more.
GROWTH_MIB = {"server": 32, "worker": 64}
# A small KV cache: its memory is all touched soon, and requests are preempted for want of blocks.
FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(32 << 20))
ABORTED = 0.35  # share of the requests that the client drops


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    mib: float
    fds: int
    threads: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        """Measured now."""
        return cls(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())

    def __str__(self) -> str:
        return f"{self.mib:.0f} MiB, {self.fds} fds, {self.threads} threads"


async def load(
    url: str, seconds: float, seed: int, parallel: int, requests: int | None = None
) -> tuple[Counter[str], list[str]]:
    """Mixed requests, `requests` of them or for `seconds`; how they ended, and the complaints."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    until = time.monotonic() + seconds
    left = itertools.count(requests or 0, -1)

    def goes_on() -> bool:
        return time.monotonic() < until if requests is None else next(left) > 0

    async def client(http: httpx.AsyncClient, chance: random.Random) -> None:
        while goes_on():
            path, body = mixed_request(chance)
            if chance.random() < 0.05:
                body["priority"] = chance.randint(-2, 2)
            drop = chance.expovariate(1.0) if chance.random() < ABORTED else None
            found = await send(http, path, body, drop)
            counts[found.end] += 1
            if found.end not in ("done", "dropped"):
                faults.append(str(found))

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        chances = [random.Random(f"{seed} {number}") for number in range(parallel)]
        await asyncio.gather(*(client(http, chance) for chance in chances))
    return counts, faults


def run(
    server: RunningServer,
    seconds: float,
    seed: int,
    parallel: int,
    pauses: int,
    requests: int | None = None,  # in place of `seconds`
) -> list[str]:
    """Load with pauses; the complaints."""
    each = None if requests is None else -(-requests // pauses)
    processes = {"server": psutil.Process(server.process.pid), "worker": server.worker}
    history: list[dict[str, Held]] = []
    faults: list[str] = []
    began = time.monotonic()
    for pause in range(pauses):
        work = load(server.url, seconds / pauses, seed + pause, parallel, each)
        counts, found = asyncio.run(work)
        faults += found
        if left := at_rest(server, 3):
            faults.append(f"taken in pause {pause}: {left}")
        history.append({name: Held.by(process) for name, process in processes.items()})
        shown = "; ".join(f"{name} {held}" for name, held in history[-1].items())
        print(f"{time.monotonic() - began:5.0f} s: {dict(counts)}; {shown}", flush=True)
    if server.worker != processes["worker"]:
        return [*faults, "the worker died"]
    return faults + growth(history)


def growth(history: list[dict[str, Held]]) -> list[str]:
    """What is held at the end and was not after the warm-up."""
    faults = []
    for name, limit in GROWTH_MIB.items():
        first, last = history[len(history) // 3][name], history[-1][name]
        if last.mib - first.mib > limit or last.fds > first.fds + 8 or last.threads > first.threads:
            faults.append(f"{name} grew from {first} to {last}")
    return faults


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, help="so many, in place of --minutes")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    server = RunningServer(*FLAGS).wait_ready()
    try:
        pauses = max(4, int(options.minutes * 2) if options.requests is None else 30)
        seconds, seed, parallel = options.minutes * 60, options.seed, options.parallel
        faults = run(server, seconds, seed, parallel, pauses, options.requests)
    finally:
        status = server.stop()
    print("\n".join(faults[:50]) or "all well")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
