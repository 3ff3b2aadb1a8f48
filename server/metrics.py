"""The Prometheus metrics of a server: vLLM's names with a prefix, in a registry of their own.

They are updated from the engine's step statistics and from the timings of requests. Histograms are
plain lists that a collector reads, because they are updated for every token.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from ..runner.messages import Ready, StepStats

_FINE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
TOKEN_SECONDS = (*_FINE, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
FIRST_TOKEN_SECONDS = (*_FINE, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
REQUEST_SECONDS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_Kind = TypeVar("_Kind", Counter, Gauge)
TROUBLE_SIGNS = ("zero", "drop", "loop")
OUTCOMES = ("stop", "length", "abort", "error")
# Field of StepStats -> name and description of the counter that adds it up.
_STEP_COUNTERS = {
    "num_prompt_tokens": (
        "prompt_tokens_computed", "Prompt tokens computed, cached ones not counted.",
    ),
    "num_generated_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the cache."),
    "num_preemptions": ("num_preemptions", "Requests preempted."),
    "num_plain_steps": (
        "plain_decode_steps", "Decode steps of a request without drafts to verify.",
    ),
    "num_drafts": ("spec_decode_num_drafts", "Steps that verified drafts."),
    "num_draft_tokens": ("spec_decode_num_draft_tokens", "Tokens drafted."),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafts accepted."),
    "decode_seconds": (
        "spec_decode_seconds", "Duration of decode steps without prompts, if K is chosen.",
    ),
    "seconds_without_drafts": (
        "spec_decode_seconds_without_drafts",
        "How long their tokens would have taken without drafts, by measured steps without.",
    ),
}  # fmt: skip


class Histogram:
    """Counts values in buckets. It has no lock: use it only in the event loop."""

    def __init__(self, name: str, doc: str, bounds: Sequence[float]) -> None:
        self.name, self.doc, self.bounds = name, doc, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """The cumulative counts in Prometheus' format: (upper bound, count)."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return found


class _Histograms(Collector):
    def __init__(self, labels: dict[str, str], histograms: list[Histogram]) -> None:
        self._labels = labels
        self._histograms = histograms

    def collect(self) -> Iterable[Metric]:
        for histogram in self._histograms:
            family = HistogramMetricFamily(histogram.name, histogram.doc, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family


class _Joined(CollectorRegistry):
    """Several registries with the same metrics, whose samples differ in labels."""

    def __init__(self, parts: Sequence[CollectorRegistry]) -> None:
        super().__init__()
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for part in self._parts:
            for family in part.collect():
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples += family.samples
        return families.values()


class Ended(NamedTuple):
    """The facts about a choice that has ended."""

    arrived: float  # time.monotonic() of the HTTP request
    first_token_seconds: float | None  # None if there was no token
    num_prompt_tokens: int
    num_tokens: int
    outcome: str


class RequestTiming:
    """The timing of one choice, from the HTTP request's arrival to the choice's end."""

    __slots__ = ("_arrived", "_ended", "_first", "_last", "_metrics", "_num_tokens", "_prompt")

    def __init__(self, metrics: Metrics, arrived: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._prompt = num_prompt_tokens
        self._first = self._last = 0.0
        self._num_tokens = 0
        self._ended = False

    def tokens(self, count: int, now: float) -> None:
        """Record `count` tokens that arrived together at `now`.

        The time since the previous tokens is divided evenly among them.
        """
        if not count:
            return
        metrics = self._metrics
        if not self._num_tokens:
            self._first = self._last = now
            metrics.first_token.observe(now - self._arrived)
            metrics.prompt_tokens.inc(self._prompt)
            count -= 1
            self._num_tokens = 1
        if count:
            metrics.inter_token.observe((now - self._last) / count, count)
            self._num_tokens += count
        self._last = now

    def move(self, metrics: Metrics) -> None:
        """Record in other metrics: those of the engine that serves the choice."""
        self._metrics = metrics

    def end(self, outcome: str) -> None:
        """Record the end: "stop", "length", "abort" or "error". Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.outcomes[outcome if outcome in OUTCOMES else "stop"].inc()
        if metrics.on_end is not None:
            first = self._first - self._arrived if self._num_tokens else None
            metrics.on_end(Ended(self._arrived, first, self._prompt, self._num_tokens, outcome))
        if outcome in ("abort", "error"):
            return
        metrics.request_seconds.observe(time.monotonic() - self._arrived)
        metrics.request_prompt_tokens.observe(self._prompt)
        metrics.request_generation_tokens.observe(self._num_tokens)
        if self._num_tokens > 1:
            metrics.request_token_seconds.observe(
                (self._last - self._first) / (self._num_tokens - 1)
            )


class Metrics:
    """All metrics of a server that serves `model_name` under `prefix`."""

    def __init__(self, prefix: str, model_name: str, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        self.on_end: Callable[[Ended], None] | None = None  # called for every choice that ends
        self.engines = [self]  # the metrics of each engine
        self._prefix = prefix
        self._ready: Ready | None = None  # facts of the newest worker
        self._labels = {"model_name": model_name, "engine": engine}
        self._make_gauges()
        self._make_counters()
        self._make_histograms()

    def _make_gauges(self) -> None:
        gauge = partial(self._metric, Gauge)
        self.running = gauge("num_requests_running", "Requests in the running batch.")
        self.waiting = gauge("num_requests_waiting", "Requests waiting to run.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._up = gauge("engine_up", "1 while the worker serves, otherwise 0.")
        self._current_k = gauge("spec_decode_current_k", "Draft length K of the newest step.")
        self._healthy = gauge(
            "spec_decode_drafter_healthy",
            "0 while drafting is off because the drafter seems broken, otherwise 1.",
        )
        self._healthy.set(1)
        self._imbalance = gauge(
            "expert_load_imbalance", "Load of a layer's busiest expert over the mean of all."
        )
        self._startup = gauge(
            "startup_seconds", "Duration of the worker's start, by phase.", "phase"
        )

    def _make_counters(self) -> None:
        counter = partial(self._metric, Counter)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of started requests.")
        self._of_step = [(field, counter(*named)) for field, named in _STEP_COUNTERS.items()]
        self._restarts = counter("engine_restarts", "Times the worker was started again.")
        self._lost_drafters = counter(
            "spec_decode_lost_drafters",
            "Worker restarts at which the drafter could not be loaded and was replaced or dropped.",
        )
        self._num_restarts = self._num_lost_drafters = 0
        self._expert_tokens = counter(
            "expert_tokens", "Tokens computed by the experts of an engine's first GPU, by choice."
        )
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position.", "position"
        )
        self._k_steps = counter(
            "spec_decode_k_steps",
            "Steps, by draft length K and the reason for choosing it.",
            "k",
            "reason",
        )
        self._troubles = counter(
            "spec_decode_drafter_troubles",
            "Signs of trouble the watchdog saw; zero and loop turn the drafter off, drop warns.",
            "sign",
        )
        for sign in TROUBLE_SIGNS:
            self._labelled(self._troubles, sign)
        success = counter("request_success", "Ended requests, by outcome.", "finished_reason")
        self.outcomes = {outcome: self._labelled(success, outcome) for outcome in OUTCOMES}
        self._lowered_claims = counter(
            "attention_claims_lowered",
            "Graph-capture claims of the attention back end that failed their start-up test.",
            "backend",
        )
        self._http = Counter(
            self._name("http_requests"),
            "HTTP requests, by method, route and status.",
            ["method", "handler", "status"],
            registry=self.registry,
        )

    def _make_histograms(self) -> None:
        made: list[Histogram] = []

        def histogram(name: str, doc: str, bounds: Sequence[float]) -> Histogram:
            made.append(Histogram(self._name(name), doc, bounds))
            return made[-1]

        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_SECONDS
        )
        # vLLM's older name for the same histogram, which its dashboards still use.
        older = histogram("time_per_output_token_seconds", "As inter_token_latency.", TOKEN_SECONDS)
        older.counts = self.inter_token.counts
        self._mirror: Callable[[], None] = lambda: setattr(older, "sum", self.inter_token.sum)
        self.request_token_seconds = histogram(
            "request_time_per_output_token_seconds", "Mean per request.", TOKEN_SECONDS
        )
        self.request_seconds = histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", REQUEST_SECONDS
        )
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKENS
        )
        self._step_tokens = histogram("iteration_tokens_total", "Tokens of a step.", TOKENS)
        self.registry.register(_Histograms(self._labels, made))

    def add_engines(self, count: int) -> None:
        """Make metrics for the engines 1 to `count` - 1; this object's are those of engine 0."""
        name = self._labels["model_name"]
        self.engines += [Metrics(self._prefix, name, str(n)) for n in range(1, count)]

    def assign(self, timings: Sequence[RequestTiming], streams: Sequence[object]) -> None:
        """Record each choice in the metrics of the engine that serves it."""
        if len(self.engines) > 1:
            for timing, stream in zip(timings, streams, strict=True):
                own = self.engines[getattr(stream, "engine", 0)]
                own.on_end = self.on_end
                timing.move(own)

    def request(self, arrived: float, num_prompt_tokens: int) -> RequestTiming:
        """The timing of a new choice; `arrived` is time.monotonic() at the request's arrival."""
        return RequestTiming(self, arrived, num_prompt_tokens)

    def step(self, stats: StepStats) -> None:
        """Update gauges, counters and histograms with the statistics of an engine step."""
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_usage.set(stats.kv_cache_usage)
        for field, counter in self._of_step:
            if value := getattr(stats, field):
                counter.inc(value)
        for position, accepted in enumerate(stats.accepted_per_pos):
            if accepted:
                self._labelled(self._per_position, str(position)).inc(accepted)
        self._drafting(stats)
        if stats.expert_load is not None:
            self._expert_tokens.inc(stats.expert_load.tokens)
            self._imbalance.set(stats.expert_load.imbalance)
        if stats.num_prompt_tokens or stats.num_generated_tokens:
            self._step_tokens.observe(stats.num_prompt_tokens + stats.num_generated_tokens)

    def _drafting(self, stats: StepStats) -> None:
        if stats.drafter_healthy is not None:
            self._healthy.set(int(stats.drafter_healthy))
        for sign, count in stats.drafter_troubles.items():
            self._labelled(self._troubles, sign).inc(count)
        if stats.current_k is not None:
            self._current_k.set(stats.current_k)
            self._labelled(self._k_steps, str(stats.current_k), stats.k_reason).inc()

    def engine_ready(self, ready: Ready) -> None:
        """Record that the worker is ready, with the facts of its start.

        May be called repeatedly: a worker's lowered claims are counted once.
        """
        self._up.set(1)
        for phase, seconds in ready.startup_seconds.items():
            self._labelled(self._startup, phase).set(seconds)
        for backend in ready.lowered_claims if ready is not self._ready else ():
            self._labelled(self._lowered_claims, backend).inc()
        self._ready = ready
        for position in range(ready.num_speculative_tokens):
            self._labelled(self._per_position, str(position))

    def engine_gone(self) -> None:
        """Reset the gauges while no worker runs."""
        for gauge in (self._up, self.running, self.waiting, self.kv_usage, self._current_k):
            gauge.set(0)
        self._healthy.set(1)  # the next worker's drafter counts as healthy

    def engine_restarts(self, total: int) -> None:
        self._restarts.inc(total - self._num_restarts)
        self._num_restarts = total

    def lost_drafters(self, total: int) -> None:
        self._lost_drafters.inc(total - self._num_lost_drafters)
        self._num_lost_drafters = total

    def http(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP response. `handler` is the route, not the path, so that labels are few."""
        self._http.labels(method, handler, str(status)).inc()

    def text(self) -> bytes:
        for engine in self.engines:
            engine._mirror()
        if len(self.engines) == 1:
            return generate_latest(self.registry)
        return generate_latest(_Joined([engine.registry for engine in self.engines]))

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _metric(self, kind: type[_Kind], name: str, doc: str, *labels: str) -> _Kind:
        """A metric; one without `labels` of its own is ready to be counted."""
        made = kind(self._name(name), doc, [*self._labels, *labels], registry=self.registry)
        return made if labels else self._labelled(made)

    def _labelled(self, metric: _Kind, *values: str) -> _Kind:
        return metric.labels(*self._labels.values(), *values)
