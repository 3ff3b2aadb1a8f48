"""Measures how many chunks a second the client of `slipstream bench serve` can read.

    PYTHONPATH=.src python tests/lab/bench_client.py [--processes 8] [--streams 512] [--rate 50000]

Server processes without a model send each stream a chunk of text in every step, each in a packet of
its own, as a real server does. The client is `bench serve`'s. If `--rate` is above what the client
can read, the sockets' buffers fill and the client's own speed is measured; the gap between the
rates and the time that chunks waited is then the client's. It prints chunks per second, and per
second of CPU time of the client processes, as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import select
import socket
import time
from dataclasses import dataclass
from typing import Any

from slipstream.server.bench import client_processes as clients
from slipstream.server.bench.load import BenchRequest
from slipstream.server.bench.serve import Target, percentile

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _chunk(**fields: Any) -> bytes:
    head = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion"}
    head |= {"created": 1700000000, "model": "m"}
    return _framed(b"data: " + json.dumps(head | fields).encode() + b"\n\n")


TOKEN = _chunk(choices=[{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}])


def _end(tokens: int) -> bytes:
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    return _chunk(choices=[], usage=usage) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@dataclass
class _Stream:
    link: socket.socket
    received: bytes = b""
    left: int = 0
    unsent: bytes = b""


def serve(port: Any, tokens: int, rate: float) -> None:
    """Main function of a server process: sends `rate` chunks per second over all streams."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    streams: dict[int, _Stream] = {}
    port.value = listener.getsockname()[1]
    end, due = _end(tokens), time.perf_counter()
    while True:
        open_ones = [stream for stream in streams.values() if stream.left or stream.unsent]
        wait = due - time.perf_counter() if open_ones else 0.05
        for handle, _ in poll.poll(max(0.0, wait)):
            if handle == listener.fileno():
                link, _ = listener.accept()
                link.setblocking(False)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                streams[link.fileno()] = _Stream(link)
                poll.register(link, select.EPOLLIN)
            elif not _receive(streams[handle], tokens):
                poll.unregister(handle)
                streams.pop(handle).link.close()
        if not open_ones or time.perf_counter() < due:
            continue
        due = max(due + len(open_ones) / rate, time.perf_counter())
        for stream in open_ones:
            if not stream.unsent:
                stream.left -= 1
                stream.unsent = TOKEN if stream.left else TOKEN + end
            try:
                stream.unsent = stream.unsent[stream.link.send(stream.unsent) :]
            except BlockingIOError:
                pass  # the client does not keep up
            except OSError:
                stream.left, stream.unsent = 0, b""


def _receive(stream: _Stream, tokens: int) -> bool:
    """Read a request; False if the connection has ended."""
    try:
        data = stream.link.recv(1 << 16)
    except OSError:
        return False
    stream.received += data
    head, found, body = stream.received.partition(b"\r\n\r\n")
    if found:
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0])
        if len(body) >= length:
            stream.received = b""
            stream.link.send(_HEAD)
            stream.left = tokens
    return bool(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    parser.add_argument("--servers", type=int, default=0, help="server processes (0: as many)")
    parser.add_argument("--streams", type=int, default=64, help="open at once")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200, help="chunks of a reply")
    parser.add_argument("--rate", type=float, default=1e9, help="chunks per second, all servers")
    args = parser.parse_args()
    count = args.servers or args.processes
    ports, servers = [multiprocessing.Value("i", 0) for _ in range(count)], []
    for port in ports:
        arguments = (port, args.tokens, args.rate / count)
        servers.append(multiprocessing.Process(target=serve, args=arguments, daemon=True))
        servers[-1].start()
    while not all(port.value for port in ports):
        time.sleep(0.01)
    # With several servers, each client process has the URL of its own.
    loads = [
        clients.Load(
            Target(f"http://127.0.0.1:{port.value}/v1/completions", "m", chat=False),
            [BenchRequest("hi", args.tokens)] * (args.requests // count),
            [0.0] * (args.requests // count), args.streams // count, 600.0,
        )
        for port in ports
    ]  # fmt: skip
    began = time.perf_counter()
    if count == 1:
        found = [clients.send_from(args.processes, loads[0], lambda: None)]
    else:
        with multiprocessing.Pool(count) as pool:
            found = pool.map(_send, loads)
    seconds = time.perf_counter() - began
    for server in servers:
        server.kill()
    outcomes = [outcome for part in found for outcome in part.outcomes]
    errors = {outcome.error for outcome in outcomes if outcome.error}
    chunks = sum(1 + len(outcome.gaps) for outcome in outcomes)
    longest = max(part.seconds for part in found)
    gaps = sorted(gap for outcome in outcomes for gap in outcome.gaps)
    cpu = sum(part.seconds * part.cpu_share for part in found)
    figures = {
        "processes": args.processes, "errors": sorted(errors), "chunks": chunks,
        "seconds": round(longest, 3), "wall_s": round(seconds, 3),
        "chunks_per_s": round(chunks / longest),
        "chunks_per_cpu_s": round(chunks / cpu),
        "cpu_share": round(max(part.cpu_share for part in found), 3),
        "itl_ms": {f"p{p}": round(1e3 * percentile(gaps, p), 3) for p in (50, 99)},
    }  # fmt: skip
    print(json.dumps(figures))


def _send(load: clients.Load) -> clients.Measured:
    return clients.send_from(1, load, lambda: None)


if __name__ == "__main__":
    main()
