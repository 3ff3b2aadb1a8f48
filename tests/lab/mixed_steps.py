"""Measures mixed steps: 200 decodes and one prompt in every step, and prompts alone.

`PYTHONPATH=.src python tests/lab/mixed_steps.py llama-8b` on a GPU; `shapes.py` writes the folder.
Prints milliseconds per step by length of the prompt, and for some lengths the time by kernel and
the share of the step in which the GPU is idle.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.configs.schema import CacheConfig, Config, ModelConfig, SchedulerConfig
from slipstream.runner.engine.engine import Engine, build_engine
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from idle import Timeline  # noqa: E402

NUM_DECODES = 200


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
        device = torch._C._autograd.DeviceType.CUDA
        events = [
            (float(event.time_range.start), float(event.time_range.end), event.name)
            for event in seen.events()
            if event.device_type == device
        ]
        line = Timeline(sorted(events))
        line.measure()
        steps = line.span / 1e3 / milliseconds
        idle, count = line.idle / line.span, len(line.events) / steps
        print(f"{title}: {milliseconds:.2f} ms under the profiler, idle {idle:.1%}, {count:.0f} "
              "kernels a step", flush=True)  # fmt: skip
        for name, microseconds in line.busy.most_common(9):
            print(f"   {microseconds / steps / 1000:7.3f} ms  {name}")


def main(model: str) -> None:
    """Measure with random weights of the model's shape."""
    config = Config(
        model=ModelConfig(model=model, load_format="dummy", max_model_len=4096),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        cache=CacheConfig(gpu_memory_utilization=0.7, enable_prefix_caching=False),
    )
    engine = build_engine(config, lambda _: None)
    load = Load(engine)
    decodes = [load.add(128, 3900) for _ in range(NUM_DECODES)]
    load.run(40, 0)
    print(f"{NUM_DECODES} decodes: {load.run(40, 0):.2f} ms", flush=True)
    for length in (64, 128, 256, 512, 1024, 2048):
        load.run(6, length)
        print(f"{NUM_DECODES} decodes + {length}: {load.run(24, length):.2f} ms", flush=True)
    load.profile(16, 256, f"{NUM_DECODES} decodes + 256")
    load.profile(12, 1024, f"{NUM_DECODES} decodes + 1024")
    engine.handle([AbortRequests(decodes)])
    while engine.has_work():
        engine.step()
    for length in (512, 2048, 3000, 4000):
        load.run(4, length)
        print(f"prompt of {length} alone: {load.run(12, length):.2f} ms", flush=True)
    load.profile(8, 3000, "prompt of 3000 alone")
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
