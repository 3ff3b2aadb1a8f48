"""Measures mixed steps: some decodes and one prompt in every step, and prompts alone.

`PYTHONPATH=.src python tests/lab/mixed_steps.py llama-8b` on a GPU; `shapes.py` writes the folder.
With `--drafter eagle3-8b --num-drafts 1` every decode verifies drafts; `--help` lists the rest.
`--wide` and `--halves` turn kernels on or off that are compared in whole steps.
Prints milliseconds per step by length of the prompt, and for some lengths the time by kernel and
the share of the step in which the GPU is idle.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
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
from slipstream.kernels.linear import linear_tuned
from slipstream.kernels.linear.linear_choice import Wide
from slipstream.kernels.linear.triton import norm_rope
from slipstream.runner.engine.engine import Engine, build_engine
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from idle import timeline_of  # noqa: E402


class Load:
    """An engine, and the requests that are added to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._draw = random.Random(1)
        self._num_added = 0

    def add(self, prompt_len: int, max_tokens: int) -> str:
        """Add a greedy request with a random prompt; returns its id."""
        self._num_added += 1
        name = f"r{self._num_added}"
        prompt = [self._draw.randrange(10, 128_000) for _ in range(prompt_len)]
        params = SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0)
        self._engine.handle([AddRequest(name, prompt, params)])
        return name

    def run(self, num_steps: int, prompt_len: int) -> float:
        """Run steps, each with a prompt of `prompt_len` tokens (0: none); returns ms per step."""
        done, began = 0, time.perf_counter()
        while done < num_steps:
            if prompt_len:
                self.add(prompt_len, 1)
            done += sum(bool(outputs.outputs) for outputs in self._engine.step())
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / num_steps

    def profile(self, num_steps: int, prompt_len: int, title: str) -> None:
        """Print the time by kernel and the idle share of such steps."""
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            milliseconds = self.run(num_steps, prompt_len)
        line = timeline_of(seen)
        steps = line.span / 1e3 / milliseconds
        idle, count = line.idle / line.span, len(line.events) / steps
        print(f"{title}: {milliseconds:.2f} ms under the profiler, idle {idle:.1%}, {count:.0f} "
              "kernels a step", flush=True)  # fmt: skip
        for name, microseconds in line.busy.most_common(9):
            print(f"   {microseconds / steps / 1000:7.3f} ms  {name}")


def parse_args() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",") if number]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument(
        "--drafter", help="folder of an EAGLE-3 head; drafts are accepted by chance"
    )
    parser.add_argument("--num-drafts", type=int, default=1)
    parser.add_argument("--decodes", type=int, default=200)
    parser.add_argument("--beside", type=numbers, default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--alone", type=numbers, default=[512, 2048, 3000, 4000])
    parser.add_argument(
        "--profile", type=numbers, default=[256, 1024], help="of steps with decodes"
    )
    parser.add_argument(
        "--wide", type=int, help="the fewest rows of gate_up by `hopper_product`; 0 = by torch"
    )
    parser.add_argument(
        "--halves", type=numbers, help="heads and warps of programs that rotate whole heads"
    )
    return parser.parse_args()


def main() -> None:
    """Measure with random weights of the model's shape."""
    args = parse_args()
    if args.wide is not None:
        linear_tuned.WIDE = {"gate_up": (args.wide, Wide())} if args.wide else {}
    if args.halves is not None:
        norm_rope.HALVES = (args.halves[0], args.halves[1]) if args.halves else None
    speculative = SpeculativeConfig()
    if args.drafter:
        speculative = SpeculativeConfig(
            "eagle3", args.drafter, args.num_drafts, load_format="dummy",
            synthetic_acceptance_rates=(0.8, 0.6, 0.42, 0.3, 0.2)[: args.num_drafts],
        )  # fmt: skip
    config = Config(
        model=ModelConfig(model=args.model, load_format="dummy", max_model_len=4096),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        cache=CacheConfig(gpu_memory_utilization=0.7, enable_prefix_caching=False),
        speculative=speculative,
    )
    engine = build_engine(config, lambda _: None)
    load, name = Load(engine), f"{args.decodes} decodes"
    decodes = [load.add(128, 3900) for _ in range(args.decodes)]
    load.run(40, 0)
    print(f"{name}: {load.run(40, 0):.2f} ms", flush=True)
    for length in args.beside:
        load.run(6, length)
        print(f"{name} + {length}: {load.run(24, length):.2f} ms", flush=True)
    for length in args.profile:
        load.profile(16 if length < 1024 else 12, length, f"{name} + {length}")
    engine.handle([AbortRequests(decodes)])
    while engine.has_work():
        engine.step()
    for length in args.alone:
        load.run(4, length)
        print(f"prompt of {length} alone: {load.run(12, length):.2f} ms", flush=True)
    if 3000 in args.alone:
        load.profile(8, 3000, "prompt of 3000 alone")
    engine.shutdown()


if __name__ == "__main__":
    main()
