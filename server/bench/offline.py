"""Measures the decode speed of a real worker through its channel, without HTTP and text.

A batch is timed with one output token per request and again with `output_len + 1`. The difference
is the time of `output_len` decode tokens per request, without the prompts.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ...configs.schema import Config
from ...runner.messages import (
    AddRequest,
    Fatal,
    FromWorker,
    Ready,
    SamplingParams,
    Shutdown,
    StepOutputs,
    ToWorker,
)
from ..drafters.acceptance import MeasurementFailed
from ..engine.engine_client import WorkerFailed
from ..engine.worker_watch import ProgressCallback, Worker

# GPU name -> bytes per second, as measured with a kernel that only reads (docs/measurements.md).
PEAK_BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.08e12, "NVIDIA H200": 4.235e12}
_GRACE_SECONDS = 5.0  # time for the worker to exit before it is killed
_MIN_REQUESTS = 8  # per iteration when drafting, since acceptance varies between requests


@dataclass(frozen=True)
class Workload:
    """What is run for every batch size; lengths are in tokens."""

    batch_sizes: tuple[int, ...]
    input_len: int = 128
    output_len: int = 256
    num_iters: int = 3
    num_warmup: int = 1
    seed: int = 0
    same_prompts: bool = False  # use the same prompts in every run of a batch size

    def num_whole_runs(self, batch_size: int, speculates: bool) -> int:
        """The number of timed runs with `output_len + 1` tokens.

        With drafts, an iteration repeats a small batch until it has run at least 8 requests,
        because the number of accepted drafts varies between requests."""
        return self.num_iters * (-(-_MIN_REQUESTS // batch_size) if speculates else 1)

    def num_runs(self, speculates: bool) -> int:
        """The number of batches that all batch sizes together run, including warm-up.

        With drafts, small batches run more often; see `num_whole_runs`.
        """
        return sum(
            self.num_warmup + self.num_iters + self.num_whole_runs(batch_size, speculates)
            for batch_size in self.batch_sizes
        )


@dataclass
class Timing:
    """Time and counts of one batch, from its submission to its last token."""

    seconds: float = 0.0
    num_steps: int = 0  # steps that generated tokens
    num_tokens: int = 0
    num_rows: int = 0  # batch rows of decode steps, with or without drafts
    num_accepted: int = 0  # accepted draft tokens
    num_drafts: int = 0  # batch rows that verified drafts
    num_draft_tokens: int = 0

    @classmethod
    def mean(cls, timings: Sequence[Timing]) -> Timing:
        """The mean of several timings; counts are rounded to integers."""
        sums = [sum(values) for values in zip(*map(astuple, timings), strict=True)]
        seconds, *counts = [value / len(timings) for value in sums]
        return cls(seconds, *map(round, counts))


def peak_bandwidth(device_name: str) -> float | None:
    """Peak memory bandwidth of a GPU in bytes per second; None if it was never measured."""
    return PEAK_BANDWIDTH.get(device_name)


class OfflineBench:
    """Measures batches on a worker that it starts and stops; use it as an async context manager.

    Raises WorkerFailed if the worker cannot start or dies, and MeasurementFailed if it rejects a
    request, loses tokens or finishes too soon for its time to be measured."""

    def __init__(
        self,
        config: Config,
        progress: ProgressCallback | None = None,
        engine: str | None = None,
    ) -> None:
        self._config = config
        self._progress = progress
        self._engine = engine
        self._num_runs = 0
        self.ready: Ready
        self.startup_seconds = 0.0

    async def __aenter__(self) -> OfflineBench:
        began = time.monotonic()
        try:
            self._worker = Worker.begin(self._config, self._engine)
        except OSError as error:
            raise WorkerFailed(f"the worker cannot be started ({error})") from error
        self.ready = _unless_failed(await self._worker.started(self._progress))
        self.startup_seconds = time.monotonic() - began
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.channel.send([Shutdown()])
        await self._worker.end(_GRACE_SECONDS)

    @property
    def name(self) -> str:
        """The name of the run: `off`, or the drafting method with K, as in `eagle3 K=auto`."""
        ready = self.ready
        if not self.speculates:
            return "off"
        auto = len(self._config.speculative.draft_counts) > 1
        return f"{ready.speculative_method} K={'auto' if auto else ready.num_speculative_tokens}"

    @property
    def speculates(self) -> bool:
        return self.ready.speculative_method != "off"

    async def measure(
        self,
        batch_size: int,
        load: Workload,
        peak: float | None = None,
        tick: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Warm up and time one batch size; returns its `figures`.

        Calls `tick` after each run. `peak` is the bandwidth for the roofline, in bytes per second.
        The prompts' time is that of the fastest short run. Of the long runs the fastest counts, or
        with a drafter their mean; "num_runs" is their number.
        """

        async def iterations(num_tokens: int, count: int) -> list[Timing]:
            timings = []
            for _ in range(count):
                timings.append(await self._run(batch_size, load, num_tokens))
                tick()
            return sorted(timings, key=lambda timing: timing.seconds)

        for _ in range(load.num_warmup):
            await self._run(batch_size, load, min(9, load.output_len + 1))
            tick()
        prefill, *_ = await iterations(1, load.num_iters)
        count = load.num_whole_runs(batch_size, self.speculates)
        timings = await iterations(load.output_len + 1, count)
        whole = Timing.mean(timings) if self.speculates else timings[0]
        noise = noise_of([timing.seconds for timing in timings], self.speculates)
        found = figures(self.ready, batch_size, load, prefill, whole, peak, noise)
        return found | {"num_runs": count}

    async def _run(self, batch_size: int, load: Workload, num_tokens: int) -> Timing:
        self._num_runs += 1
        seed = load.seed + self._num_runs * batch_size  # also varies synthetic acceptance
        vocab_size = self.ready.vocab_size
        requests: list[ToWorker] = [
            AddRequest(
                f"{self._num_runs}-{number}",
                prompt,
                SamplingParams(seed=seed + number, max_tokens=num_tokens, temperature=0.0),
            )
            for number, prompt in enumerate(prompts(load, self._num_runs, batch_size, vocab_size))
        ]
        timing, open_requests = Timing(), batch_size

        def take(message: FromWorker) -> Ready | Fatal | None:
            nonlocal open_requests
            if isinstance(message, StepOutputs):
                open_requests -= _count(timing, message)
                timing.seconds = time.perf_counter() - began
            if isinstance(message, Fatal):
                return message
            return None if open_requests else self.ready

        began = time.perf_counter()
        self._worker.channel.send(requests)
        _unless_failed(await self._worker.watch(take))
        if timing.num_tokens != batch_size * num_tokens:
            raise MeasurementFailed(
                f"the worker sent {timing.num_tokens} tokens instead of {batch_size * num_tokens}"
            )
        return timing


def _unless_failed(outcome: Ready | Fatal) -> Ready:
    if isinstance(outcome, Fatal):
        raise WorkerFailed(outcome.message)
    return outcome


def prompts(load: Workload, run: int, batch_size: int, vocab_size: int) -> list[list[int]]:
    """Random token ids for each request; they differ between runs unless `load.same_prompts`."""
    draw = random.Random(f"{load.seed} {'' if load.same_prompts else run}")
    most = vocab_size - 10
    return [
        [draw.randrange(min(10, most - 1), most) for _ in range(load.input_len)]
        for _ in range(batch_size)
    ]


def _count(timing: Timing, step: StepOutputs) -> int:
    """Add one step's outputs to `timing`; returns how many requests ended in it."""
    stats, ended, tokens = step.stats, 0, 0
    for output in step.outputs:
        if output.error is not None:
            raise MeasurementFailed(output.error)
        tokens += len(output.token_ids)
        ended += output.finish_reason is not None
    timing.num_tokens += tokens
    timing.num_steps += tokens > 0
    timing.num_rows += stats.num_drafts + stats.num_plain_steps
    timing.num_drafts += stats.num_drafts
    timing.num_draft_tokens += stats.num_draft_tokens
    timing.num_accepted += stats.num_accepted_tokens
    return ended


def noise_of(seconds: Sequence[float], speculates: bool) -> float | None:
    """The uncertainty of a batch's time, in seconds; None for a single run.

    Without drafts, where the fastest run counts, it is the slowest time minus the fastest; with
    drafts, where the mean counts, it is two standard errors."""
    if len(seconds) < 2:
        return None
    if not speculates:
        return max(seconds) - min(seconds)
    return 2 * statistics.stdev(seconds) / math.sqrt(len(seconds))


def figures(
    ready: Ready,
    batch_size: int,
    load: Workload,
    prefill: Timing,
    whole: Timing,
    peak: float | None,
    noise: float | None = None,
) -> dict[str, Any]:
    """The figures of one batch size: the decode part is `whole` minus `prefill`.

    `noise` is the uncertainty of `whole` in seconds, `peak` the memory bandwidth in bytes per
    second. Raises MeasurementFailed if the difference is not positive."""
    seconds = whole.seconds - prefill.seconds
    steps = whole.num_steps - prefill.num_steps
    tokens = whole.num_tokens - prefill.num_tokens
    if seconds <= 0 or steps <= 0:
        raise MeasurementFailed(f"batch {batch_size}: too short to measure; increase --output-len")
    rows = max(1, whole.num_rows - prefill.num_rows)
    found: dict[str, Any] = {
        "batch": batch_size,
        "prefill_s": round(prefill.seconds, 4),
        "decode_tok_s": round(tokens / seconds, 1),
        "per_user_tok_s": round(tokens / seconds / batch_size, 1),
        "whole_tok_s": round(whole.num_tokens / whole.seconds, 1),
        "step_ms": round(1e3 * seconds / steps, 3),
        "tokens_per_step": round(tokens / rows, 3),
        "spread": None if noise is None else round(noise / seconds, 4),
        "num_iters": load.num_iters,
        "acceptance": None,
        "roofline": None,
    }
    if whole.num_draft_tokens:
        found["acceptance"] = round(whole.num_accepted / whole.num_draft_tokens, 4)
    read = bytes_per_step(ready, batch_size, load, whole, steps)
    if peak and read:
        found["roofline"] = round(read / peak / (seconds / steps), 4)
        found["bytes_per_step"] = round(read)
    return found


def bytes_per_step(
    ready: Ready, batch_size: int, load: Workload, whole: Timing, steps: int
) -> float:
    """Bytes that a decode step must read: weights, the drafter's once per draft, and the KV cache
    of the mean context; 0 if the worker does not report its weights' size.

    Of routed experts it counts as many as the step's tokens touch if each chooses at random.
    """
    if not ready.weight_bytes:
        return 0.0
    context = load.input_len + (load.output_len + 1) / 2
    drafts = whole.num_draft_tokens / whole.num_drafts if whole.num_drafts else 0.0
    drafting = drafts * min(1.0, whole.num_drafts / max(1, steps * batch_size))
    untouched: float = (1 - ready.expert_share) ** (batch_size * (1 + drafting))
    return (
        ready.weight_bytes
        + ready.expert_bytes * (1 - untouched)
        + drafting * ready.draft_weight_bytes
        + batch_size * context * ready.kv_bytes_per_token
    )


def heading(peak: float | None) -> str:
    """The header of the table; the last column is the share of `peak`."""
    share = f"of {peak / 1e12:.2f} TB/s" if peak else "roofline"
    return (
        f"{'batch':>6} {'tokens/s':>10} {'per user':>8} {'ms/step':>8} {'tok/step':>8} "
        f"{'spread':>8} {share:>13}"
    )


def line(row: dict[str, Any]) -> str:
    """The row of the table for one batch size."""
    share = "-" if row["roofline"] is None else f"{100 * row['roofline']:.1f} %"
    spread = "-" if row["spread"] is None else f"{100 * row['spread']:.1f} %"
    return (
        f"{row['batch']:>6} {row['decode_tok_s']:>10,.1f} {row['per_user_tok_s']:>8.1f} "
        f"{row['step_ms']:>8.3f} {row['tokens_per_step']:>8.3f} {spread:>8} {share:>13}"
    )


def gains(runs: list[dict[str, Any]]) -> list[str]:
    """A sentence per batch size: how much faster the last run is than the first; empty for one run.

    A difference no larger than the sum of both spreads is called noise.
    """
    if len(runs) < 2:
        return []
    pairs = zip(runs[0]["results"], runs[-1]["results"], strict=True)
    return [_gain(off, on, runs[0]["name"], runs[-1]["name"]) for off, on in pairs]


def _gain(off: dict[str, Any], on: dict[str, Any], off_name: str, on_name: str) -> str:
    ratio = on["decode_tok_s"] / off["decode_tok_s"]
    found = f"batch {off['batch']}: {on_name} is {ratio:.2f} × {off_name}"
    if off["spread"] is None or on["spread"] is None:
        return f"{found}; the noise of a single iteration is unknown, increase --num-iters"
    noise = f"spreads of {100 * off['spread']:.1f} % and {100 * on['spread']:.1f} %"
    if abs(ratio - 1) > off["spread"] + on["spread"]:
        return f"{found} ({noise})"
    return f"batch {off['batch']}: no difference beyond noise ({ratio:.2f} ×; {noise})"
