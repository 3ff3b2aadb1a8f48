"""`slipstream bench serve`: measure any OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from ...configs.logs import one_line
from ...configs.options import ConfigError
from ...configs.preset import preset_model
from .output import (
    Values,
    add_output,
    add_values,
    check_file,
    check_least,
    tables_to_stderr,
    write_figures,
)

SUMMARY = "measure latency, throughput and acceptance of any OpenAI-compatible server under load"
_LATENCIES = ("ttft", "tpot", "e2el")  # those that --goodput can limit
# key of the figures -> label in the printed table
_COUNTS = {
    "completed": "requests completed",
    "failed": "requests failed",
    "duration_s": "duration, s",
    "total_input_tokens": "input tokens",
    "total_output_tokens": "output tokens",
}
_RATES = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "max_client_delay_ms": "max. client delay, ms",
}
_LATENCY_LABELS = {
    "ttft": "TTFT (first token)",
    "tpot": "TPOT (per token)",
    "itl": "ITL (between chunks)",
    "e2el": "E2EL (whole request)",
}
_VALUES: Values = {
    "--host": ("127.0.0.1", "host of the server"),
    "--port": (8000, "port of the server"),
    "--temperature": (0.0, "sampling temperature"),
    "--num-prompts": (100, "number of requests to measure"),
    "--num-warmups": (1, "requests sent before, which are not measured"),
    "--random-input-len": (128, "random: prompt length in tokens"),
    "--random-output-len": (128, "random, and custom lines that set none: tokens to generate"),
    "--random-range-ratio": (0.0, "random: vary lengths by this fraction in both directions"),
    "--max-len": (1024, "lognormal and sharegpt: longest prompt and longest reply, in tokens"),
    "--seed": (0, "random seed of lengths, prompts and arrivals"),
    "--request-rate": (math.inf, "requests sent per second; inf sends all at once"),
    "--burstiness": (
        1.0,
        "shape of the gamma-distributed gaps between requests: 1 is Poisson, less comes in bursts",
    ),
    "--timeout": (600.0, "seconds without data after which a request fails"),
}
_LEAST = {"num_warmups": 0, "num_prompts": 1, "max_concurrency": 1, "client_processes": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, named as in `vllm bench serve` where they mean the same."""
    add = parser.add_argument
    add("--base-url", metavar="URL", help="URL of the server (default: http://HOST:PORT)")
    add(
        "--backend", choices=("openai", "openai-chat"), default="openai",
        help="API to use: completions (openai) or chat (openai-chat) (default: openai)",
    )  # fmt: skip
    add("--endpoint", metavar="PATH", help="path of the endpoint (default: as for --backend)")
    add("--model", help="name of the model (default: the first one in the server's /v1/models)")
    add("--api-key", metavar="KEY", help="API key of the server (default: $OPENAI_API_KEY)")
    add(
        "--header", metavar="NAME=VALUE", action="append", default=[],
        help="additional HTTP header; repeat for several",
    )  # fmt: skip
    add(
        "--extra-body", metavar="JSON", default="{}",
        help="JSON object of additional fields for every request",
    )  # fmt: skip
    add("--ignore-eos", action="store_true", help="generate past the end-of-text token")
    add(
        "--dataset-name",
        choices=("random", "lognormal", "mixed", "sharegpt", "custom"),
        default="random",
        help="random: random tokens of given lengths; lognormal: random tokens with lengths like "
        "ShareGPT's; mixed: such requests, some of them with a long prompt or a shared system "
        "prompt; sharegpt: a file in ShareGPT's JSON format; custom: a JSONL file of prompts "
        "(default: random)",
    )
    add("--dataset-path", metavar="FILE", help="file of the dataset sharegpt or custom")
    add(
        "--tokenizer",
        help="tokenizer that counts sharegpt's tokens (default: assume four characters per token)",
    )
    add("--max-concurrency", type=int, metavar="INT", help="most requests open at once")
    add(
        "--goodput", metavar="NAME:MS", nargs="+", default=[],
        help="count requests within these limits of ttft, tpot or e2el, in milliseconds",
    )  # fmt: skip
    add(
        "--client-processes", type=int, metavar="INT",
        help="number of processes that send the requests (default: by cores and concurrency)",
    )  # fmt: skip
    add_values(parser, _VALUES)
    add_output(parser)
    add("--plot", metavar="FILE", help="draw the latency distributions as PNG")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status, which is 1 if any request failed."""
    from .output import check_plot

    check_least(args, _LEAST)
    if not (args.request_rate > 0 and args.burstiness > 0):
        raise ConfigError("--request-rate and --burstiness must be above 0")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError("--random-range-ratio must be at least 0 and below 1")
    check_plot(args.plot)
    check_file("--output", args.output)
    limits, requests = _limits(args.goodput), _requests(args)
    with tables_to_stderr(args.output):
        found = asyncio.run(_measure(args, limits, requests))
        if found is None:
            return 1
        _show(args, found)
    write_figures(args.output, {k: v for k, v in found.items() if k != "samples"})
    return 1 if found["failed"] else 0


def _limits(goodput: list[str]) -> dict[str, float]:
    limits = {}
    for item in goodput:
        name, _, text = item.partition(":")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = -1.0
        if name not in _LATENCIES or limits[name] <= 0:
            raise ConfigError(
                f"--goodput {item}: must be {', '.join(_LATENCIES[:-1])} or {_LATENCIES[-1]}, a "
                "colon and a positive number of milliseconds"
            )
    return limits


def _requests(args: argparse.Namespace) -> list[Any]:
    from . import load

    chat, count, seed = (
        args.backend == "openai-chat",
        args.num_prompts + args.num_warmups,
        args.seed,
    )
    if args.dataset_name == "random":
        lengths = args.random_input_len, args.random_output_len
        return load.random_requests(count, *lengths, args.random_range_ratio, chat, seed)
    if args.dataset_name == "lognormal":
        return load.lognormal_requests(count, args.max_len, chat, seed)
    if args.dataset_name == "mixed":
        return load.mixed_requests(count, args.max_len, chat, seed)
    if not args.dataset_path:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    path = Path(args.dataset_path)
    if args.dataset_name == "custom":
        return load.jsonl_requests(path, count, args.random_output_len, seed)
    if args.tokenizer is None:
        return load.sharegpt_requests(path, count, lambda t: -(-len(t) // 4), args.max_len, seed)
    from ..text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(preset_model(args.tokenizer), None)
    return load.sharegpt_requests(
        path, count, lambda text: len(tokenizer.encode(text, False)), args.max_len, seed
    )


async def _measure(
    args: argparse.Namespace, limits: dict[str, float], requests: list[Any]
) -> dict[str, Any] | None:
    """Send the warm-up requests, then the measured ones.

    Returns the figures, or None, after printing the error, if a warm-up request failed."""
    import httpx

    from ..progress import CountProgress
    from . import client_processes as clients
    from . import serve as bench
    from .load import arrivals
    from .stream_client import StreamClient

    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    headers = dict(item.partition("=")[::2] for item in args.header)
    if key := args.api_key or os.environ.get("OPENAI_API_KEY"):
        headers.setdefault("Authorization", f"Bearer {key}")
    async with httpx.AsyncClient(timeout=args.timeout, trust_env=False) as client:
        target = await _target(client, args, base, headers)
        async with StreamClient(target.url, target.headers, args.timeout) as warming:
            for request in requests[: args.num_warmups]:
                warm = await bench.send_request(warming, target, request)
                if warm.error:
                    _failed(f"a warm-up request failed: {warm.error}")
                    return None
        before = await bench.drafting_counters(client, base)
        requests = requests[args.num_warmups :]
        due = list(arrivals(len(requests), args.request_rate, args.burstiness, args.seed))
        load = clients.Load(target, requests, due, args.max_concurrency, args.timeout)
        count = args.client_processes
        count = count or clients.default_processes(len(requests), args.max_concurrency)
        with CountProgress("bench serve", len(requests), "requests") as bar:
            measured = await asyncio.to_thread(clients.send_from, count, load, bar.update)
        after = await bench.drafting_counters(client, base)
    found = {"kind": "serve", "url": target.url, "model": target.model}
    found |= {"dataset": args.dataset_name, "request_rate": str(args.request_rate)}
    found |= {"max_concurrency": args.max_concurrency, "seed": args.seed}
    found |= {"client_processes": count, "client_cpu_share": round(measured.cpu_share, 3)}
    found |= bench.figures(measured.outcomes, measured.seconds, limits)
    found["speculation"] = bench.acceptance(before, after)
    return found


async def _target(client: Any, args: argparse.Namespace, base: str, headers: dict[str, str]) -> Any:
    import httpx

    from .serve import Target, unauthorized_error

    model = args.model
    if model is None:
        try:
            reply = await client.get(f"{base}/v1/models", headers=headers)
            if reply.status_code == 401:
                raise ConfigError(unauthorized_error(headers))
            if reply.status_code != 200:
                raise ConfigError(f"{base}/v1/models: HTTP {reply.status_code}")
            model = reply.json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{base}/v1/models: {type(error).__name__}: {error}") from None
    chat = args.backend == "openai-chat"
    path = args.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from None
    return Target(base + path, model, chat, headers, extra, args.temperature, args.ignore_eos)


def _failed(why: str) -> None:
    print(f"slipstream bench serve: error: {one_line(why)}", file=sys.stderr)


def _show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    from .client_processes import BOTTLENECK_SHARE
    from .output import plot_serve

    for name, label in _COUNTS.items():
        print(f"{label:24} {found[name]:>12}")
    for name, label in _RATES.items():
        print(f"{label:24} {found[name]:>12.2f}")
    print(f"{'latency, ms':24} {'mean':>12} {'median':>12} {'p90':>12} {'p99':>12}")
    for name, label in _LATENCY_LABELS.items():
        if values := found[f"{name}_ms"]:
            print(f"{label:24} " + " ".join(f"{value:>12.2f}" for value in values.values()))
    if "goodput" in found:
        print(f"{'goodput, requests/s':24} {found['goodput']['request_throughput']:>12.2f}")
    if drafts := found["speculation"]:
        print(f"{'acceptance rate':24} {drafts['acceptance_rate']:>12.4f}")
        print(f"{'tokens per verify step':24} {drafts['mean_acceptance_length']:>12.4f}")
    share = found["client_cpu_share"]
    if share >= BOTTLENECK_SHARE and found["duration_s"] >= 1:
        print(
            f"the client may have been the bottleneck: one of its {found['client_processes']} "
            f"processes used {share:.0%} of a core; increase --client-processes",
            file=sys.stderr,
        )
    for error, count in found["errors"].items():
        print(f"{count} × {one_line(error)}", file=sys.stderr)  # may contain text of the server
    if args.plot:
        plot_serve(found, args.plot)
