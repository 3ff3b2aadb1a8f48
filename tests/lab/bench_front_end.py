"""Measures how many tokens per second the server's front end (tokenizer and HTTP) can stream.

Run `python tests/lab/bench_front_end.py`. It runs three processes: `slipstream serve`, a worker
that repeats the prompts' tokens at a given rate over the real channel, and this load generator,
which reads raw sockets. It prints the speed, delays, number of chunks and CPU times as JSON. Fewer
chunks than tokens mean that the server was too slow and merged some.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

_MOST_SECONDS = 120.0
_LOOK_SECONDS = 0.002
_ROOT = Path(__file__).parents[2]
_TEXT = (
    "Slow streams cut deep valleys; quick ones polish stones. A river that carries two hundred "
    "boats must not wait for any one of them, and none of them may be lost: so the pilot counts "
    "them at the bridge, again at the weir, and once more where the fresh water meets the sea. "
)


@dataclass(frozen=True)
class Load:
    """The load on the server."""

    num_streams: int = 256
    tokens_per_stream: int = 512
    tokens_per_step: int = 1
    rate: float = 30_000.0  # tokens/s that the worker generates, over all streams
    endpoint: str = "chat"  # or "completions"

    @property
    def seconds_per_step(self) -> float:
        return self.num_streams * self.tokens_per_step / self.rate


@dataclass
class Figures:
    """The measurements of a run."""

    tokens_per_second: float  # from the first byte of text to the last
    offered_per_second: float
    chunks_per_step: float  # per stream; 1.0 if no chunks were merged
    first_chunk_s: float  # median, from the request
    largest_gap_s: float  # the longest pause of any stream after its first chunk
    server_cpu_us: float  # per token
    worker_cpu_us: float
    client_cpu_us: float
    same_text: bool  # whether every stream had the text of its own prompt


class _Stream:
    """One request on its own connection; what it receives is parsed only after the run."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.began = time.monotonic()
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.parts: list[bytes] = []
        self.first = self.last = self.gap = 0.0

    def read(self, now: float) -> bool:
        """Read the available bytes; returns whether the answer is complete."""
        data = self.socket.recv(65536)
        assert data, "the server closed the connection early"
        if self.first:
            self.gap = max(self.gap, now - self.last)
        elif self.parts:  # the first bytes after the head and the chunk with the role
            self.first = now
        self.last = now
        self.parts.append(data)
        return data.endswith(b"0\r\n\r\n")

    def events(self) -> list[dict[str, Any]]:
        """Parse the events that were received."""
        body = b"".join(self.parts).split(b"\r\n\r\n", 1)[1]
        plain = bytearray()
        while body:
            size, _, body = body.partition(b"\r\n")
            plain += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
        lines = [line[6:] for line in bytes(plain).split(b"\n\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def _request(load: Load, number: int, port: int) -> bytes:
    body: dict[str, Any] = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": load.tokens_per_stream,
        "ignore_eos": True,
        "temperature": 0,
    }
    text = f"Boat {number}. {_TEXT}"
    if load.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if load.endpoint == "chat" else "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _drive(load: Load, port: int) -> list[_Stream]:
    """Run all streams; polls every 2 ms, because a wake-up for each chunk would slow both sides."""
    streams = [_Stream(port, _request(load, n, port)) for n in range(load.num_streams)]
    by_number = {stream.socket.fileno(): stream for stream in streams}
    deadline = time.monotonic() + _MOST_SECONDS
    with select.epoll() as poll:
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        left = len(streams)
        while left:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            assert now < deadline, f"{left} streams have not ended"
            for number, _ in poll.poll(0):
                if by_number[number].read(now):
                    poll.unregister(number)
                    by_number[number].socket.close()
                    left -= 1
    return streams


def _start(load: Load, port: int) -> subprocess.Popen[bytes]:
    pace = asdict(load) | {"seconds_per_step": load.seconds_per_step}
    paths = [str(_ROOT / "tests" / "server"), str(_ROOT / ".src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "SLIPSTREAM_TEST_ENGINE": "front_end_engine:build",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    flags = ["--hf-overrides", json.dumps(pace), "--served-model-name", "m", "--log-level", "error"]
    flags += ["--max-num-seqs", str(load.num_streams), "--port", str(port), "-sc", "off"]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream.server.commands", "serve", *flags],
        env=environment,
        stdout=subprocess.DEVNULL,
    )


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run(load: Load, port: int | None = None) -> Figures:
    """Start a server, measure it under this load and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", port or 0))
        port = int(free.getsockname()[1])
    process = _start(load, port)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None and time.monotonic() < deadline, (
                "the server did not start"
            )
            time.sleep(0.1)
        server = psutil.Process(process.pid)
        watched = [server, server.children()[0], psutil.Process()]
        before = [_seconds(each) for each in watched]
        streams = _drive(load, port)
        used = [_seconds(each) - start for each, start in zip(watched, before, strict=True)]
    finally:
        process.terminate()
        process.wait(20)
    return _figures(load, streams, used)


def _figures(load: Load, streams: list[_Stream], used: list[float]) -> Figures:
    found = [stream.events() for stream in streams]
    tokens = sum(events[-1]["usage"]["completion_tokens"] for events in found)
    assert tokens == load.num_streams * load.tokens_per_stream
    seconds = max(s.last for s in streams) - min(s.first for s in streams)
    steps = -(-load.tokens_per_stream // load.tokens_per_step)
    pieces = [[_piece(load, event) for event in events] for events in found]
    chunks = sum(sum(map(bool, texts)) for texts in pieces)
    waits = sorted(s.first - s.began for s in streams)
    # The worker repeats the prompt, so the text must contain the part that only this prompt has.
    same = all(f"Boat {number}." in "".join(texts) for number, texts in enumerate(pieces))
    return Figures(
        tokens_per_second=round(tokens / seconds, 1),
        offered_per_second=load.rate,
        chunks_per_step=round(chunks / steps / load.num_streams, 4),
        first_chunk_s=round(waits[len(waits) // 2], 4),
        largest_gap_s=round(max(s.gap for s in streams), 4),
        server_cpu_us=round(1e6 * used[0] / tokens, 2),
        worker_cpu_us=round(1e6 * used[1] / tokens, 2),
        client_cpu_us=round(1e6 * used[2] / tokens, 2),
        same_text=same,
    )


def _piece(load: Load, event: dict[str, Any]) -> str:
    if not event["choices"]:
        return ""
    choice = event["choices"][0]
    return str(choice["delta"].get("content") or "" if load.endpoint == "chat" else choice["text"])


def main() -> None:
    """Run one load and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="per stream")
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument(
        "--rate", type=float, default=30_000.0, help="tokens/s that the worker generates"
    )
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    args = parser.parse_args()
    load = Load(args.streams, args.tokens, args.tokens_per_step, args.rate, args.endpoint)
    print(json.dumps(asdict(load) | asdict(run(load))))


if __name__ == "__main__":
    main()
