"""Loads engines that share their experts with random requests, and fails if any of them hangs.

`python tests/lab/engine_group.py MODEL -dp 2 --steps 1000 --drafts 2` starts the engines as the
server does, with random weights and the drafter of `--method`. Requests arrive at random, some are
aborted, and at times all are left to end, so that the group rests. After `--steps` steps of every
engine it measures a decode step of one request beside an idle engine, and of `--batch` requests on
each engine. It prints one line of JSON, and exits with status 1 if a request is silent for 60 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.runner.messages import AddRequest, SamplingParams, StepStats
from slipstream.server.engine.engine_client import EngineClient
from slipstream.server.engine.engines import Engines, create_engine

SILENT_SECONDS = 60.0
RATES = [0.8, 0.6, 0.42, 0.3, 0.2]
OPEN = 24  # most requests at a time, while they arrive at random


@dataclass
class Load:
    """Sends requests and counts what comes back."""

    engines: Any
    vocab_size: int
    max_len: int
    rng: random.Random
    steps: list[int]  # of each engine, with rows of its own
    num_requests: int = 0
    num_tokens: int = 0
    num_aborted: int = 0
    running: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, prompt_len: int, max_tokens: int, aborts: bool = False) -> None:
        prompt = [self.rng.randrange(10, self.vocab_size) for _ in range(prompt_len)]
        sampling = SamplingParams(seed=self.num_requests, max_tokens=max_tokens, temperature=0.0)
        name = str(self.num_requests)
        self.num_requests += 1
        stream = self.engines.submit(AddRequest(name, prompt, sampling))
        until = self.rng.randrange(1, 20) if aborts else max_tokens
        task = asyncio.create_task(self._read(name, stream, until))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _read(self, name: str, stream: Any, until: int) -> None:
        found, outputs = 0, aiter(stream)
        while True:
            try:
                output = await asyncio.wait_for(anext(outputs), SILENT_SECONDS)
            except StopAsyncIteration:
                return
            assert output.error is None, output.error
            found += len(output.token_ids)
            self.num_tokens += len(output.token_ids)
            if found > until:
                self.num_aborted += 1
                self.engines.abort(name)
                return

    async def idle(self) -> None:
        """Wait until all requests have ended; raises their errors."""
        while self.running:
            done, _ = await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def at_random(self, num_steps: int) -> None:
        """Send requests until every engine has run `num_steps` steps of its own."""
        while min(self.steps) < num_steps:
            for task in [task for task in self.running if task.done()]:
                task.result()
            if len(self.running) < OPEN:
                longest = min(1500, self.max_len // 2)
                prompt_len = self.rng.choice((1, 9, 60, longest))
                self.start(prompt_len, self.rng.randrange(1, 200), self.rng.random() < 0.2)
            await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.05, 0.2)))
            if self.rng.random() < 0.03:
                await self.idle()
        await self.idle()

    async def rate(self, num_reqs: int, max_tokens: int) -> tuple[float, float]:
        """(tokens per second, milliseconds per step) of so many equal requests."""
        began, tokens, steps = time.monotonic(), self.num_tokens, max(self.steps)
        for _ in range(num_reqs):
            self.start(16, max_tokens)
        await self.idle()
        seconds = time.monotonic() - began
        count = max(self.steps) - steps
        return (self.num_tokens - tokens) / seconds, 1e3 * seconds / max(1, count)


def configured(args: argparse.Namespace) -> Config:
    drafts = SpeculativeConfig()
    if args.method != "off":
        drafts = SpeculativeConfig(
            method=args.method,
            load_format=args.load_format,
            num_speculative_tokens=args.drafts,
            synthetic_acceptance_rates=tuple(RATES[: args.drafts]),
        )
    return Config(
        model=ModelConfig(
            model=args.model, load_format=args.load_format, device=args.device,
            max_model_len=args.max_model_len,
        ),
        scheduler=SchedulerConfig(max_num_seqs=args.batch, max_num_batched_tokens=2048),
        cache=CacheConfig(),
        graph=GraphConfig(
            enforce_eager=args.enforce_eager, cudagraph_whole_step=not args.no_whole_step
        ),
        speculative=drafts,
        parallel=ParallelConfig(
            args.tp,
            args.dp,
            enable_expert_parallel=not args.no_expert_parallel,
            disable_custom_all_reduce=args.nccl,
            all2all_backend=args.all2all_backend,
        ),
    )  # fmt: skip


async def run(args: argparse.Namespace) -> dict[str, object]:
    engines = create_engine(configured(args))
    began = time.monotonic()
    await engines.start(lambda progress: None)
    clients = engines.clients if isinstance(engines, Engines) else [engines]
    steps = [0] * len(clients)

    def counted(index: int, client: EngineClient) -> None:
        def count(stats: StepStats) -> None:
            steps[index] += stats.num_running > 0

        client.stats = count

    for index, client in enumerate(clients):
        counted(index, client)
    ready = engines.ready
    result: dict[str, object] = {"start_seconds": round(time.monotonic() - began, 1)}
    load = Load(engines, ready.vocab_size, ready.max_model_len, random.Random(args.seed), steps)
    try:
        began = time.monotonic()
        await load.at_random(args.steps)
        result |= {
            "seconds": round(time.monotonic() - began, 1), "steps": list(steps),
            "requests": load.num_requests, "aborted": load.num_aborted, "tokens": load.num_tokens,
        }  # fmt: skip
        await load.rate(1, 8)
        names = ("tokens_per_second", "ms_per_step")
        for num_reqs in (1, len(clients) * args.batch):
            found = await load.rate(num_reqs, args.output_len)
            rounded = (round(value, 2) for value in found)
            result[f"{num_reqs} requests"] = dict(zip(names, rounded, strict=True))
        assert all(client.health.report.restarts == 0 for client in clients), "an engine restarted"
    finally:
        await engines.shutdown(grace=5.0)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-dp", type=int, default=2)
    parser.add_argument("-tp", type=int, default=1)
    parser.add_argument("--no-expert-parallel", action="store_true")
    parser.add_argument("--all2all-backend", default="allgather_reducescatter")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--method", default="mtp")
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="requests of each engine")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--nccl", action="store_true", help="add up everything by NCCL")
    parser.add_argument("--no-whole-step", action="store_true", help="sample outside graphs")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
