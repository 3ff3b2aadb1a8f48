"""Kills or freezes the worker repeatedly, at random moments under load.

Run `python tests/reliability/kill_worker.py --rounds 20`. In each round every open request must end
within two seconds: a stream with an error object as its last event, any other request with a 503
and the same object. After a freeze they have --worker-timeout seconds more. Then the server must
serve again, with no batch row or KV block in use and no process of the old worker left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from traffic import MODEL, Outcome, RunningServer, at_rest, mixed_request, send  # noqa: E402

SECONDS = 2.0  # within which every open request must end


async def one_round(
    server: RunningServer, sig: signal.Signals, chance: random.Random, timeout: float
) -> list[str]:
    """Send requests, then `sig` to the worker, and check how they end; returns the faults."""
    killed: list[float] = []
    outcomes: list[Outcome] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:

        async def client(chance: random.Random) -> None:
            while not killed:
                path, body = mixed_request(chance, max_tokens=200)
                outcomes.append(await send(http, path, body))

        clients = [asyncio.create_task(client(random.Random(chance.random()))) for _ in range(12)]
        await asyncio.sleep(chance.uniform(0.3, 1.5))
        worker = server.worker
        killed.append(time.monotonic())
        worker.send_signal(sig)
        await asyncio.wait_for(asyncio.gather(*clients), timeout + 30)
        ready = (await http.get("/ready")).status_code
    open_then = [each for each in outcomes if each.ended > killed[0]]
    late = SECONDS + (timeout if sig == signal.SIGSTOP else 0)
    faults = [f"after {each.ended - killed[0]:.2f} s: {each}" for each in open_then
              if each.ended - killed[0] > late]  # fmt: skip
    faults += [f"ended wrongly: {each}" for each in outcomes if not ended_well(each)]
    failed = sum(each.end == "error" for each in open_then)
    print(f"{sig.name}: {len(outcomes)} requests, {len(open_then)} open, {failed} of them failed")
    if not failed:
        faults.append("no open request failed")
    if ready != 503:
        faults.append(f"/ready answered {ready} instead of 503 while the worker restarted")
    return faults + came_back(server, worker)


def ended_well(outcome: Outcome) -> bool:
    """Whether a request succeeded, or failed with the proper status and error object."""
    if outcome.end == "done":
        return outcome.status == 200
    error = outcome.error or {}
    explained = bool(error.get("message"))
    if outcome.path != "/v1/responses":  # errors of that route have a code but no type
        explained = explained and error.get("type") == "service_unavailable"
    streams = outcome.body["stream"] and outcome.status == 200
    return outcome.end == "error" and explained and (outcome.status == 503 or streams)


def came_back(server: RunningServer, old: psutil.Process) -> list[str]:
    """Wait until the server is ready and check that it recovered; returns the faults."""
    server.wait_ready(90)
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    faults = []
    if answer.status_code != 200:
        faults.append(f"the next request got a {answer.status_code}: {answer.text}")
    if old.is_running() and old.status() != psutil.STATUS_ZOMBIE:
        faults.append("the old worker still runs")
    worker = server.worker  # the new one; its children compile grammars
    left = set(server.descendants()) - {worker, *worker.children(recursive=True)}
    if left:
        faults.append(f"processes of the old worker: {left}")
    if left_in_use := at_rest(server):
        faults.append(f"still in use after the restart: {left_in_use}")
    return faults


def run(
    server: RunningServer, signals: list[signal.Signals], seed: int, timeout: float
) -> list[str]:
    """Run one round for each signal; returns the faults of all rounds."""
    chance = random.Random(seed)
    faults = []
    for sig in signals:
        faults += asyncio.run(one_round(server, sig, chance, timeout))
    return faults


def main() -> int:
    """Run all rounds on a server of their own; returns 0 if there were no faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    server = RunningServer("--worker-timeout", "5", "--drain-timeout", "5").wait_ready()
    everyone = [psutil.Process(server.process.pid), *server.descendants()]
    try:
        kinds = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
        signals = [kinds[number % 4] for number in range(options.rounds)]
        faults = run(server, signals, options.seed, 5)
        everyone += server.descendants()
    finally:
        status = server.stop()
    faults += [
        f"process still running after shutdown: {each}" for each in everyone if each.is_running()
    ]
    print("\n".join(faults) or f"{options.rounds} rounds, no faults; exit status {status}")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
