"""Measures an engine under a closed loop: requests with lengths as in chats, and a new one for each
that ends, without HTTP.

`PYTHONPATH=.src python tests/lab/closed_loop.py llama-8b` on a GPU; `shapes.py` writes the folder.
Prints generated tokens per second, milliseconds and rows per step, and the mean duration of steps
by their rows. `--sizes 512,1024` caps each step at the largest of these numbers of rows that the
waiting prompts fill; several such lists, separated by spaces, are measured one after another, and
`all` caps nothing. `x128` stands for all multiples of 128. With `--drafter eagle3-8b`, `--drafts
auto 1 3` measures each number of drafts. `--prompt 3000 --reply 64` gives all requests these
lengths. `--profile N` then prints the time by kernel of N steps.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from slipstream.runner.engine.engine import Engine, build_engine
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams, StepOutputs
from slipstream.runner.scheduling.scheduler import Scheduler
from slipstream.runner.scheduling.step_time import StepBudget

sys.path.insert(0, str(Path(__file__).parent))
from idle import timeline_of  # noqa: E402

WIDTH = 64  # rows of a bin
ORIGINAL = Scheduler._new_budget


class ClosedLoop:
    """A constant number of requests, and what their steps took."""

    def __init__(self, engine: Engine, num_requests: int, prompt: int, reply: int) -> None:
        self._engine, self._lengths = engine, (prompt, reply)
        self._draw = random.Random(1)
        self._num_added = 0
        self._running: set[str] = set()
        for _ in range(num_requests):
            self._add()

    def _length(self, median: float, sigma: float) -> int:
        return max(4, min(1024, round(self._draw.lognormvariate(math.log(median), sigma))))

    def _add(self) -> None:
        self._num_added += 1
        name = f"r{self._num_added}"
        num_prompt = self._lengths[0] or self._length(110, 1.2)
        num_reply = self._lengths[1] or self._length(145, 0.8)
        prompt = [self._draw.randrange(10, 128_000) for _ in range(num_prompt)]
        params = SamplingParams(seed=1, max_tokens=num_reply, temperature=0.0)
        self._engine.handle([AddRequest(name, prompt, params)])
        self._running.add(name)

    def _steps(self) -> list[StepOutputs]:
        found = []
        for outputs in self._engine.step():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self._running.discard(output.request_id)
                    self._add()
            if outputs.stats.num_generated_tokens or outputs.stats.num_prompt_tokens:
                found.append(outputs)
        return found

    def run(self, seconds: float, title: str) -> None:
        """Run for some seconds after as long a warm-up of a third, and print what was seen."""
        until = time.perf_counter() + seconds / 3
        while time.perf_counter() < until:
            self._steps()
        bins: dict[int, list[float]] = defaultdict(list)
        verified_drafts: Counter[int] = Counter()
        tokens = prompt_tokens = num_steps = 0
        began = last = time.perf_counter()
        while last < began + seconds:
            for outputs in self._steps():
                now, stats = time.perf_counter(), outputs.stats
                verified = stats.num_drafts + stats.num_draft_tokens + stats.num_plain_steps
                rows = verified + stats.num_prompt_tokens
                mean = stats.num_draft_tokens / max(1, stats.num_drafts + stats.num_plain_steps)
                verified_drafts[round(mean)] += 1
                bins[rows // WIDTH].append(now - last)
                tokens += stats.num_generated_tokens
                prompt_tokens += stats.num_prompt_tokens
                num_steps, last = num_steps + 1, now
        spent = last - began
        print(
            f"{title}: {tokens / spent:,.0f} tokens/s, {prompt_tokens / spent:,.0f} of prompts/s, "
            f"{1e3 * spent / num_steps:.2f} ms and {tokens / num_steps:.0f} tokens a step; "
            f"steps by drafts of a request: {dict(sorted(verified_drafts.items()))}",
            flush=True,
        )
        for index, times in sorted(bins.items()):
            mean = 1e3 * sum(times) / len(times)
            print(f"   {index * WIDTH:5}+ rows: {len(times):4} steps of {mean:6.2f} ms")

    def profile(self, num_steps: int) -> None:
        """Print the time by kernel and the idle share of some steps."""
        done = prompt_tokens = 0
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            began = time.perf_counter()
            while done < num_steps:
                found = self._steps()
                done += len(found)
                prompt_tokens += sum([outputs.stats.num_prompt_tokens for outputs in found])
            torch.cuda.synchronize()
            milliseconds = 1e3 * (time.perf_counter() - began) / num_steps
        line = timeline_of(seen)
        steps = line.span / 1e3 / milliseconds
        print(f"{milliseconds:.2f} ms a step under the profiler, {prompt_tokens / done:.0f} prompt "
              f"tokens, idle {line.idle / line.span:.1%}", flush=True)  # fmt: skip
        for name, microseconds in line.busy.most_common(24):
            print(f"   {microseconds / steps / 1000:7.3f} ms  {name}")

    def close(self) -> None:
        self._engine.handle([AbortRequests(sorted(self._running))])
        while self._engine.has_work():
            self._engine.step()


def cap_steps(sizes: list[int]) -> None:
    """Cap each step at the largest of `sizes` that its decodes and the waiting prompts fill."""

    def new_budget(self: Scheduler) -> StepBudget:
        budget = ORIGINAL(self)
        decodes = waiting = 0
        for request in self.running:
            if request.is_prefilling:
                waiting += request.prefill_len - request.num_prefilled
            else:
                decodes += self._limits.num_speculative_tokens + 1
        for request in self.waiting:
            waiting += len(request.token_ids)
            if waiting > 8192:
                break
        fitting = [size for size in sizes if decodes + 32 <= size <= decodes + waiting]
        if fitting:
            budget.tokens = min(budget.tokens, fitting[-1])
        return budget

    Scheduler._new_budget = new_budget  # type: ignore[method-assign]


def main() -> None:
    """Measure with random weights of the model's shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--drafter", help="folder of an EAGLE-3 head; drafts accepted by chance")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=9.0)
    parser.add_argument("--drafts", nargs="*", default=["auto"], help="numbers of drafts, or auto")
    parser.add_argument("--sizes", nargs="*", default=["all"])
    parser.add_argument("--prompt", type=int, default=0, help="tokens of each prompt; 0: as chats")
    parser.add_argument("--reply", type=int, default=0, help="tokens of each reply; 0: as chats")
    parser.add_argument("--profile", type=int, default=0, help="steps to profile at the end")
    args = parser.parse_args()
    speculative = SpeculativeConfig()
    if args.drafter:
        speculative = SpeculativeConfig(
            "eagle3", args.drafter, load_format="dummy", synthetic_acceptance_rates=(0.8, 0.6, 0.42)
        )
    config = Config(
        model=ModelConfig(model=args.model, load_format="dummy", max_model_len=4096),
        scheduler=SchedulerConfig(max_num_seqs=256),
        cache=CacheConfig(gpu_memory_utilization=0.7, enable_prefix_caching=False),
        speculative=speculative,
    )
    engine = build_engine(config, lambda _: None)
    loop = ClosedLoop(engine, args.requests, args.prompt, args.reply)
    for sizes in args.sizes:
        Scheduler._new_budget = ORIGINAL  # type: ignore[method-assign]
        if sizes != "all":
            step = int(sizes[1:]) if sizes.startswith("x") else 0
            cap_steps(list(range(step, 8193, step)) if step else list(map(int, sizes.split(","))))
        for drafts in args.drafts:
            if engine.drafts is not None:
                engine.drafts.controller.hold(None if drafts == "auto" else int(drafts))
            loop.run(args.seconds, f"{args.requests} requests, steps of {sizes}, drafts {drafts}")
    if args.profile:
        loop.profile(args.profile)
    loop.close()
    torch.cuda.synchronize()
    engine.shutdown()


if __name__ == "__main__":
    main()
