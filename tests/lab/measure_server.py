"""Measures how much time HTTP and text processing add to the engine's decode time.

Run `PYTHONPATH=.src python tests/lab/measure_server.py MODEL [-- FLAGS]`. MODEL is a folder from
`shapes.py`; the weights are random. Server and engine get FLAGS. First, several client processes
load `slipstream serve` with 256 streams of /v1/completions: prompts of 128 random ids, 257 tokens,
temperature 0. Then `slipstream bench offline` runs with the same flags. For both, the time of the
fastest run with one token per request is subtracted from that of the fastest run with 257. The
difference is the time for 256 decode tokens per request, without prompts and connections. The exit
status is 1 if HTTP adds 5 % or more.

The tokenizer has an invented word for each id, so that every token yields text. A client that is
busy all the time limits the speed: increase --clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slipstream.server.bench.load import BenchRequest
from slipstream.server.bench.serve import Target, percentile, run_load
from slipstream.server.bench.stream_client import StreamClient

BOUND = 0.05
FLAGS = (
    "--load-format dummy --max-model-len 4096 --max-num-seqs 256 --max-num-batched-tokens 8192 "
    "--no-enable-prefix-caching --kv-cache-memory-bytes 18g -sc off"
).split()
START_SECONDS = 180.0
_ENV = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", ".src")}


@dataclass
class Round:
    """The measurements of one run of all streams, over all clients."""

    began: float = float("inf")
    ended: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # seconds between chunks of a stream
    tpots: list[float] = field(default_factory=list)
    busiest: float = 0.0  # CPU time of the busiest client, divided by the duration of the run
    server_cpu: float = 0.0  # seconds
    worker_cpu: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def make_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write a byte-level tokenizer to `folder`: the 256 bytes, then a word for each id."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters[:vocab_size])}
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def client(
    number: int, url: str, args: argparse.Namespace, vocab: int, start: Any, out: Any
) -> None:
    """Run this client's share of the streams in each round, after waiting at `start`.

    It runs in its own process and puts its measurements into the queue `out`."""
    draw = random.Random(number)
    streams = args.streams // args.clients + (number < args.streams % args.clients)
    words = [
        [draw.randrange(min(256, vocab // 2), vocab - 10) for _ in range(args.input_len)]
        for _ in range(streams)
    ]

    async def drive() -> None:
        target = Target(f"{url}/v1/completions", "m", False, ignore_eos=True)
        async with StreamClient(target.url, {}, 120.0) as session:
            for max_tokens in rounds(args):
                requests = [BenchRequest(prompt, max_tokens) for prompt in words]
                start.wait()
                began, used = time.perf_counter(), time.process_time()
                outcomes, seconds = await run_load(session, target, requests, [0.0] * streams, None)
                busy = (time.process_time() - used) / seconds
                errors = [outcome.error for outcome in outcomes if outcome.error]
                gaps = [gap for outcome in outcomes for gap in outcome.gaps]
                tpots = [outcome.tpot for outcome in outcomes if outcome.tpot is not None]
                tokens = sum(outcome.output_tokens for outcome in outcomes)
                out.put((began, began + seconds, tokens, gaps, tpots, busy, errors))

    asyncio.run(drive())


def rounds(args: argparse.Namespace) -> list[int]:
    """The number of tokens per request in each round; the first round is a warm-up."""
    return [9, *[1] * args.num_iters, *[args.output_len + 1] * args.num_iters]


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_server(model: str, flags: list[str], log: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server and wait until it is ready; returns the process and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-P", "-m", "slipstream.server.commands", "serve", model, *flags]
    command += ["--served-model-name", "m", "--port", str(port)]
    process = subprocess.Popen(command, env=_ENV, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return process, url
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the server did not become ready; its log is {log.name}")


def serve(model: str, flags: list[str], args: argparse.Namespace, vocab: int) -> list[Round]:
    """Run all rounds with a new server and new clients."""
    context = multiprocessing.get_context("spawn")
    start, out = context.Barrier(args.clients + 1), context.Queue()
    with open(args.log, "wb") as log:
        process, url = start_server(model, flags, log)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        clients = [
            context.Process(target=client, args=(i, url, args, vocab, start, out), daemon=True)
            for i in range(args.clients)
        ]
        try:
            for each in clients:
                each.start()
            wanted = [tokens * args.streams for tokens in rounds(args)]
            pids = [process.pid, *map(int, children)]
            return [one_round(pids, args.clients, start, out, tokens) for tokens in wanted]
        finally:
            for each in clients:
                each.kill()
            process.send_signal(signal.SIGTERM)
            process.wait(40)


def one_round(pids: list[int], clients: int, start: Any, out: Any, expected: int) -> Round:
    """Start a round in all clients and collect their measurements.

    `pids` are those of the server and its workers, for their CPU times."""
    found = Round()
    start.wait(60)
    before = [cpu_seconds(pid) for pid in pids]
    for _ in range(clients):
        began, ended, tokens, gaps, tpots, busy, errors = out.get(timeout=120)
        if errors:
            raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
        found.began, found.ended = min(found.began, began), max(found.ended, ended)
        found.tokens += tokens
        found.gaps += gaps
        found.tpots += tpots
        found.busiest = max(found.busiest, busy)
    used = [cpu_seconds(pid) - since for pid, since in zip(pids, before, strict=True)]
    found.server_cpu, found.worker_cpu = used[0], sum(used[1:])
    assert found.tokens == expected, (found.tokens, expected)
    return found


def served_figures(found: list[Round], args: argparse.Namespace) -> dict[str, Any]:
    """Calculate the figures of `bench offline`, and also gaps, chunks and CPU times."""
    ones, wholes = found[1 : 1 + args.num_iters], found[1 + args.num_iters :]
    prefill = min(one.seconds for one in ones)
    whole = min(wholes, key=lambda each: each.seconds)
    seconds = whole.seconds - prefill
    gaps = sorted(whole.gaps)
    decode = args.streams * args.output_len
    return {
        "decode_tok_s": decode / seconds,
        "prefill_s": prefill,
        "spread": (max(each.seconds for each in wholes) - whole.seconds) / seconds,
        "tok_s_by_tpot": sum(1 / tpot for tpot in whole.tpots),
        "chunks_per_token": (len(gaps) + args.streams) / whole.tokens,
        "gap_ms": [1e3 * percentile(gaps, share) for share in (50, 90, 99, 100)],
        "median_tpot_ms": 1e3 * statistics.median(whole.tpots),
        "server_us": 1e6 * whole.server_cpu / whole.tokens,
        "worker_us": 1e6 * whole.worker_cpu / whole.tokens,
        "busiest_client": whole.busiest,
    }


def offline_figures(model: str, flags: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run `slipstream bench offline`; returns its figures."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-P", "-m", "slipstream.server.commands", "bench", "offline"]
        command += [model, "--batch-sizes", str(args.streams), "--input-len", str(args.input_len)]
        command += ["--output-len", str(args.output_len), "--num-iters", str(args.num_iters)]
        command += ["--output", file.name, *flags]
        subprocess.run(command, env=_ENV, check=True)
        row: dict[str, Any] = json.load(file)["runs"][0]["results"][0]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    for flag, default in (("streams", 256), ("input-len", 128), ("output-len", 256)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--num-iters", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    log = Path(tempfile.gettempdir()) / "measure_server.log"
    parser.add_argument("--log", default=str(log), help="file for the server's log")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, flags = parser.parse_args(given[:cut]), [*FLAGS, *given[cut + 1 :]]
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(vocab, Path(folder))
        rows = served_figures(serve(args.model, [*flags, "--tokenizer", folder], args, vocab), args)
    served_at = time.perf_counter()
    print(
        f"server:  {rows['decode_tok_s']:>9,.1f} tokens/s, spread {100 * rows['spread']:.1f} %, "
        f"prompts {rows['prefill_s']:.3f} s; {rows['tok_s_by_tpot']:,.1f} by the streams' TPOT\n"
        f"         {rows['chunks_per_token']:.3f} chunks per token; gaps between them "
        + " / ".join(f"{ms:.2f}" for ms in rows["gap_ms"])
        + " ms (median, p90, p99, longest)\n"
        f"         CPU time per token: server {rows['server_us']:.1f}, worker "
        f"{rows['worker_us']:.1f} us; busiest client {100 * rows['busiest_client']:.0f} %",
        flush=True,
    )
    alone = offline_figures(args.model, flags, args)
    added = alone["decode_tok_s"] / rows["decode_tok_s"] - 1
    spread = "unknown" if alone["spread"] is None else f"{100 * alone['spread']:.1f} %"
    print(
        f"offline: {alone['decode_tok_s']:>9,.1f} tokens/s, spread {spread}, "
        f"prompts {alone['prefill_s']:.3f} s, {alone['step_ms']:.3f} ms per step\n"
        f"HTTP and text add {100 * added:.2f} % (bound {100 * BOUND:.0f} %); "
        f"{served_at - began:.0f} + {time.perf_counter() - served_at:.0f} s"
    )
    print(json.dumps({"served": rows, "offline": alone, "added": added}))
    return 1 if added >= BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
