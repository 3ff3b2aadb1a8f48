"""Clients that dribble, stop reading or freeze, beside ordinary ones, on a live server.

`python tests/reliability/slow_clients.py --clients 200`. The slow ones must be cut within the time
that --client-timeout gives them, their requests end with them, and nobody else waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from traffic import MODEL, RunningServer, at_rest  # noqa: E402

FLAGS = ("--client-timeout", "2", "--drain-timeout", "5")
TIMEOUT = 2.0
# A reply of some MB: what the kernel buffers for a client is a part of it.
LARGE = {
    "model": MODEL,
    "prompt": "The sea",
    "max_tokens": 400,
    "n": 8,
    "logprobs": 20,
    "stream": True,
    "ignore_eos": True,
}
FROZEN_CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("POST", "/v1/completions", sys.argv[2], {"content-type": "application/json"})
response = connection.getresponse()
response.readline()
print("reading", flush=True)
while response.readline():
    pass
"""


async def dribble(port: int, begin: bytes, data: bytes) -> tuple[float, bytes]:
    """Send a byte now and then; when the server had enough, and what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)
    began = time.monotonic()
    answer = asyncio.create_task(reader.read())
    for byte in data:
        if answer.done():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(0.1)
    try:
        said = await asyncio.wait_for(answer, 30)
    except ConnectionError:
        said = b""
    writer.close()
    return time.monotonic() - began, said


async def slow_loris(server: RunningServer, clients: int) -> list[str]:
    """Half of them never finish a head, half never finish a body."""
    line = b"POST /v1/completions HTTP/1.1\r\n"
    head = (line, b"X-Long: " + b"y" * 1000)
    body = (line + b"Content-Length: 5000\r\n\r\n", b" " * 1000)
    tasks = [
        asyncio.create_task(dribble(server.port, *(head, body)[number % 2]))
        for number in range(clients)
    ]
    await asyncio.sleep(0.2)
    faults = await others(server, 3)
    for seconds, said in await asyncio.gather(*tasks):
        if seconds > TIMEOUT * 2 or (said and b" 408 " not in said):
            faults.append(f"a dribbling client was cut after {seconds:.1f} s with {said[:80]!r}")
    return faults


async def others(server: RunningServer, requests: int) -> list[str]:
    """Ordinary requests are answered, and soon."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
    faults = []
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        for _ in range(requests):
            began = time.monotonic()
            status = (await http.post("/v1/completions", json=body)).status_code
            seconds = time.monotonic() - began
            if status != 200 or seconds > 5:
                faults.append(f"another client got a {status} after {seconds:.1f} s")
    return faults


async def deaf_client(server: RunningServer) -> list[str]:
    """One asks for a large stream and does not read it."""
    data = json.dumps(LARGE).encode()
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    with deaf:
        deaf.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n"
        deaf.sendall(head.encode() + data)
        return await cut(server, "deaf")


async def frozen_client(server: RunningServer) -> list[str]:
    """One is stopped in the middle of its stream."""
    command = [sys.executable, "-c", FROZEN_CLIENT, str(server.port), json.dumps(LARGE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        try:
            return await cut(server, "frozen")
        finally:
            child.kill()


async def cut(server: RunningServer, kind: str, seconds: float = 45) -> list[str]:
    """Others are served meanwhile; then the request counts as aborted, and nothing is taken."""
    aborted = server.metric("request_success_total", finished_reason="abort")
    faults = await others(server, 3)
    deadline = time.monotonic() + seconds
    while server.metric("request_success_total", finished_reason="abort") == aborted:
        if time.monotonic() > deadline:
            return [*faults, f"the request of a {kind} client goes on after {seconds} s"]
        await asyncio.sleep(0.2)
    if left := at_rest(server):
        faults.append(f"taken after a {kind} client: {left}")
    return faults


async def all_of_them(server: RunningServer, clients: int) -> list[str]:
    """One kind after the other; the complaints."""
    faults = []
    for name, attack in (
        ("slow loris", slow_loris(server, clients)),
        ("deaf", deaf_client(server)),
        ("frozen", frozen_client(server)),
    ):
        began = time.monotonic()
        found = await attack
        print(f"{name}: {time.monotonic() - began:.1f} s, {len(found)} complaints", flush=True)
        faults += found
    return faults


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    options = parser.parse_args()
    server = RunningServer(*FLAGS).wait_ready()
    try:
        faults = asyncio.run(all_of_them(server, options.clients))
    finally:
        status = server.stop()
    print("\n".join(faults) or "all well")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
