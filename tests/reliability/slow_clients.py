"""Checks that clients that send slowly, stop reading or freeze are disconnected.

Run `python tests/reliability/slow_clients.py --clients 200`. The server must disconnect them after
--client-timeout and abort their requests. Meanwhile it must answer other clients without delay.
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
# The reply has several MB, which is more than the kernel buffers for a client.
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


async def send_slowly(port: int, begin: bytes, data: bytes) -> tuple[float, bytes]:
    """Send `begin`, then a byte of `data` every 0.1 s, until the server closes the connection.

    Returns the seconds until it did and the server's answer."""
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
        received = await asyncio.wait_for(answer, 30)
    except ConnectionError:
        received = b""
    writer.close()
    return time.monotonic() - began, received


async def slow_loris(server: RunningServer, clients: int) -> list[str]:
    """Half of the clients send an endless head, half an endless body; returns the faults."""
    line = b"POST /v1/completions HTTP/1.1\r\n"
    head = (line, b"X-Long: " + b"y" * 1000)
    body = (line + b"Content-Length: 5000\r\n\r\n", b" " * 1000)
    tasks = [
        asyncio.create_task(send_slowly(server.port, *(head, body)[number % 2]))
        for number in range(clients)
    ]
    await asyncio.sleep(0.2)
    faults = await others(server, 3)
    for seconds, reply in await asyncio.gather(*tasks):
        if seconds > TIMEOUT * 2 or (reply and b" 408 " not in reply):
            faults.append(f"a slow client was cut off after {seconds:.1f} s with {reply[:80]!r}")
    return faults


async def others(server: RunningServer, requests: int) -> list[str]:
    """Send ordinary requests, which must be answered within 5 s each; returns the faults."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
    faults = []
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        for _ in range(requests):
            began = time.monotonic()
            status = (await http.post("/v1/completions", json=body)).status_code
            seconds = time.monotonic() - began
            if status != 200 or seconds > 5:
                faults.append(f"another client got status {status} after {seconds:.1f} s")
    return faults


async def unread_stream(server: RunningServer) -> list[str]:
    """A client requests a large stream and does not read it; returns the faults."""
    data = json.dumps(LARGE).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    with client:
        client.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        return await is_cut_off(server, "non-reading")


async def frozen_client(server: RunningServer) -> list[str]:
    """A client process is stopped in the middle of its stream; returns the faults."""
    command = [sys.executable, "-c", FROZEN_CLIENT, str(server.port), json.dumps(LARGE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        try:
            return await is_cut_off(server, "frozen")
        finally:
            child.kill()


async def is_cut_off(server: RunningServer, kind: str, seconds: float = 45) -> list[str]:
    """Check that the open request is aborted and frees its memory; returns the faults.

    Other requests must be answered meanwhile."""
    aborted = server.metric("request_success_total", finished_reason="abort")
    faults = await others(server, 3)
    deadline = time.monotonic() + seconds
    while server.metric("request_success_total", finished_reason="abort") == aborted:
        if time.monotonic() > deadline:
            return [*faults, f"the request of a {kind} client still runs after {seconds} s"]
        await asyncio.sleep(0.2)
    if left := at_rest(server):
        faults.append(f"still in use after a {kind} client: {left}")
    return faults


async def all_of_them(server: RunningServer, clients: int) -> list[str]:
    """Run each kind of slow client in turn; returns the faults."""
    faults = []
    for name, attack in (
        ("slow loris", slow_loris(server, clients)),
        ("unread stream", unread_stream(server)),
        ("frozen", frozen_client(server)),
    ):
        began = time.monotonic()
        found = await attack
        print(f"{name}: {time.monotonic() - began:.1f} s, {len(found)} faults", flush=True)
        faults += found
    return faults


def main() -> int:
    """Run all kinds on a server of their own; returns 0 if there were no faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    options = parser.parse_args()
    server = RunningServer(*FLAGS).wait_ready()
    try:
        faults = asyncio.run(all_of_them(server, options.clients))
    finally:
        status = server.stop()
    print("\n".join(faults) or "no faults")
    return bool(faults or status)


if __name__ == "__main__":
    sys.exit(main())
