"""Keeps a live server under mixed load with aborts and checks that it leaks nothing.

Run `python tests/reliability/soak.py --requests 3000` (or `--minutes 30`). The load pauses
regularly; in a pause no batch row or KV block may be in use. Each pause also measures the memory,
file descriptors and threads of server and worker. They may not grow between the end of the warm-up,
which is the first third of the load, and the last pause.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from traffic import RunningServer, at_rest, mixed_request, send  # noqa: E402

# Allowed growth; allocators do not return all freed memory to the system.
GROWTH_MIB = {"server": 32, "worker": 64}
# The memory of a large KV cache grows, because the system provides each page when it is first
# written. It is measured separately; it has one mapping per layer, and all have the same size.
CACHE_MAPPINGS, CACHE_KIB = 8, 8 << 10  # least number of such mappings, and least size of each
# With a small KV cache, all of its memory is soon in use, and requests are preempted.
FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(32 << 20))
ABORTED = 0.35  # share of the requests that the client may drop


@dataclass(frozen=True)
class Held:
    """The memory (MiB), file descriptors and threads of a process."""

    mib: float  # without a large KV cache
    cache_mib: float  # written pages of a large KV cache
    fds: int
    threads: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        """Measure a process."""
        cache = written_cache(process.pid)
        rss = process.memory_info().rss / 2**20
        return cls(rss - cache, cache, process.num_fds(), process.num_threads())

    def __str__(self) -> str:
        cache = f" and {self.cache_mib:.0f} of the KV cache" if self.cache_mib else ""
        return f"{self.mib:.0f} MiB{cache}, {self.fds} fds, {self.threads} threads"


def written_cache(pid: int) -> float:
    """The MiB of a large KV cache that are in memory; 0 if the process has no such cache."""
    in_memory: dict[int, list[int]] = {}  # KiB: size of a mapping -> what is in memory of each
    for mapping in Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:"):
        found = dict(re.findall(r"^(Size|Rss|Anonymous): +(\d+) kB", mapping, re.MULTILINE))
        if found and found["Anonymous"] == found["Rss"] != "0" and int(found["Size"]) > CACHE_KIB:
            in_memory.setdefault(int(found["Size"]), []).append(int(found["Rss"]))
    layers = [sum(each) for each in in_memory.values() if len(each) >= CACHE_MAPPINGS]
    return max(layers, default=0) / 1024


async def load(
    url: str,
    seconds: float,
    seed: int,
    parallel: int,
    requests: int | None = None,
    patience: float = 1.0,
) -> tuple[Counter[str], list[str]]:
    """Send mixed requests for `seconds`, or `requests` of them if given.

    Clients that drop a request do so after `patience` seconds on average.
    Returns counts by how the requests ended, and the faults.
    """
    counts: Counter[str] = Counter()
    faults: list[str] = []
    until = time.monotonic() + seconds
    left = itertools.count(requests or 0, -1)

    def more() -> bool:
        return time.monotonic() < until if requests is None else next(left) > 0

    async def client(http: httpx.AsyncClient, chance: random.Random) -> None:
        while more():
            path, body = mixed_request(chance)
            if chance.random() < 0.05:
                body["priority"] = chance.randint(-2, 2)
            drop = chance.expovariate(1 / patience) if chance.random() < ABORTED else None
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
    requests: int | None = None,  # replaces `seconds`
    patience: float = 1.0,
) -> list[str]:
    """Send load with pauses and check the server in each pause; returns the faults."""
    each = None if requests is None else -(-requests // pauses)
    processes = {"server": psutil.Process(server.process.pid), "worker": server.worker}
    history: list[dict[str, Held]] = []
    faults: list[str] = []
    began = time.monotonic()
    for pause in range(pauses):
        work = load(server.url, seconds / pauses, seed + pause, parallel, each, patience)
        counts, found = asyncio.run(work)
        faults += found
        if left := at_rest(server, 3):
            faults.append(f"still in use in pause {pause}: {left}")
        history.append({name: Held.by(process) for name, process in processes.items()})
        shown = "; ".join(f"{name} {held}" for name, held in history[-1].items())
        print(f"{time.monotonic() - began:5.0f} s: {dict(counts)}; {shown}", flush=True)
    if server.worker != processes["worker"]:
        return [*faults, "the worker died"]
    return faults + growth(history)


def growth(history: list[dict[str, Held]]) -> list[str]:
    """Compare the last measurement with the one after the warm-up; returns the faults."""
    faults = []
    for name, limit in GROWTH_MIB.items():
        first, last = history[len(history) // 3][name], history[-1][name]
        if last.mib - first.mib > limit or last.fds > first.fds + 8 or last.threads > first.threads:
            faults.append(f"{name} grew from {first} to {last}")
    return faults


def main() -> int:
    """Run the long check on a server of its own; returns 0 if there were no faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, help="number of requests; replaces --minutes")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--default-cache", action="store_true", help="1 GiB, not 32 MiB, of KV cache"
    )
    options = parser.parse_args()
    server = RunningServer(*(() if options.default_cache else FLAGS)).wait_ready()
    try:
        pauses = max(4, int(options.minutes * 2) if options.requests is None else 30)
        seconds, seed, parallel = options.minutes * 60, options.seed, options.parallel
        faults = run(server, seconds, seed, parallel, pauses, options.requests)
    finally:
        status = server.stop()
    print("\n".join(faults[:50]) or "no faults")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
