"""Puts an OpenAI-compatible server under load and measures the latencies that its clients see.

Times are taken when bytes arrive, before they are parsed. Tokens are counted from the reply's
usage, not from its chunks, because one chunk may carry several tokens.
"""

from __future__ import annotations

import asyncio
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from .load import BenchRequest
from .stream_client import StreamClient, StreamFailed

_SAMPLE = re.compile(r"^(\w+):spec_decode_num_(\w+?)(?:_total)?(?:\{([^}]*)\})? (\S+)$", re.M)
_POSITION = re.compile(r'position="(\d+)"')


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        """Whether the chunk carries output; the first chunk of a chat carries only the role."""
        for choice in self.choices:
            d = choice.delta
            if choice.text or (d and (d.content or d.reasoning_content or d.reasoning)):
                return True
            if d and d.tool_calls:
                return True
        return False


_decode = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.encode


@dataclass
class Target:
    """The endpoint under load, and what every request to it has in common."""

    url: str
    model: str
    chat: bool
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout: float = 600.0

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """The JSON body of a streaming request; `extra_body` overrides its fields."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.chat:
            body["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["messages"] = request.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body


@dataclass
class Outcome:
    """The result of one request; times are in seconds since it was sent."""

    error: str | None = None
    late: float = 0.0  # seconds that the client sent it after it was due
    ttft: float = 0.0  # to the first chunk with text
    latency: float = 0.0  # to the last chunk with text
    gaps: list[float] = field(default_factory=list)  # between consecutive chunks with text
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None if there is only one."""
        more = self.output_tokens - 1
        return (self.latency - self.ttft) / more if more > 0 else None


def unauthorized_error(headers: dict[str, str]) -> str:
    """The error for HTTP status 401: whether a key is missing or wrong, and how to pass one."""
    given = any(name.lower() == "authorization" for name in headers)
    why = "does not accept this API key" if given else "requires an API key"
    return f"the server {why} (HTTP 401); pass one with --api-key or OPENAI_API_KEY"


async def send_request(client: StreamClient, target: Target, request: BenchRequest) -> Outcome:
    """Send one request and read its stream to the end.

    A failure of the server or the connection is the outcome's `error`, not an exception."""
    reading = _Reading()
    outcome = reading.outcome
    try:
        reply = await client.post(_encode(target.body(request)), reading.take)
    except StreamFailed as error:
        outcome.error = str(error)
        return outcome
    if reply.status == 401:
        outcome.error = unauthorized_error(target.headers)
    elif reply.status != 200:
        text = reply.body.decode("utf-8", "replace")
        outcome.error = f"HTTP {reply.status}: {text[:200]}"
    else:
        reading.end()
    return outcome


class _Reading:
    def __init__(self) -> None:
        self.outcome = Outcome()
        self._began = time.perf_counter()
        self._last = 0.0  # time of the last chunk with text
        self._rest = b""  # the beginning of a line
        self._is_done = False

    def take(self, data: bytes) -> bool:
        """Take the next piece of the body; False if the rest does not matter."""
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self._event(line[5:].strip(), now):
                return False
        return True

    def _event(self, payload: bytes, now: float) -> bool:
        outcome = self.outcome
        if payload == b"[DONE]":
            self._is_done = True
            return True
        try:
            chunk = _decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
            return False
        if chunk.error is not None:
            outcome.error = f"in the stream: {str(chunk.error)[:200]}"
            return False
        if chunk.usage is not None:
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.output_tokens = chunk.usage.completion_tokens
        if chunk.has_text:
            if self._last:
                outcome.gaps.append(now - self._last)
            else:
                outcome.ttft = now - self._began
            self._last = now
        return True

    def end(self) -> None:
        outcome = self.outcome
        outcome.latency = (self._last or time.perf_counter()) - self._began
        if outcome.error is not None:
            return
        if not self._is_done:
            outcome.error = "the stream ended without [DONE]"
        elif not outcome.output_tokens:
            outcome.error = "the reply reports no usage or no output tokens"


async def run_load(
    client: StreamClient,
    target: Target,
    requests: Sequence[BenchRequest],
    due: Iterable[float],
    max_concurrency: int | None,
    tick: Callable[[], object] = lambda: None,
    began: float | None = None,
) -> tuple[list[Outcome], float]:
    """Send each request when it is due, with at most `max_concurrency` open at once.

    `due` has seconds from `began`, which is a `time.perf_counter` (None: now). A request waits
    longer if too many are open. Calls `tick` after each reply. Returns the outcomes in order and
    the duration in seconds."""
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    began = time.perf_counter() if began is None else began

    async def one(request: BenchRequest, at: float) -> Outcome:
        if slots is None:
            late = time.perf_counter() - began - at
            outcome = await send_request(client, target, request)
        else:
            async with slots:  # waiting for a slot does not count as lateness
                late = 0.0
                outcome = await send_request(client, target, request)
        outcome.late = max(0.0, late)
        tick()
        return outcome

    tasks = []
    for request, at in zip(requests, due, strict=True):
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(request, at)))
    outcomes = await asyncio.gather(*tasks)
    return outcomes, time.perf_counter() - began


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile `share`, from 0 to 100, of sorted values, by linear interpolation."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, median, p90 and p99, in milliseconds, of values in seconds; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {"mean": statistics.fmean(ordered)}
    found |= {
        name: percentile(ordered, p) for name, p in (("median", 50), ("p90", 90), ("p99", 99))
    }
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def figures(
    outcomes: Sequence[Outcome], seconds: float, goodput: dict[str, float]
) -> dict[str, Any]:
    """All figures of a run that lasted `seconds`; failed requests count only as failures.

    `goodput` maps ttft, tpot and e2el to limits in milliseconds. The raw latencies, in seconds,
    are in "samples"."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens = sum(outcome.output_tokens for outcome in good)
    prompts = sum(outcome.prompt_tokens for outcome in good)
    samples = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [tpot for outcome in good if (tpot := outcome.tpot) is not None],
        "itl": [gap for outcome in good for gap in outcome.gaps],
        "e2el": [outcome.latency for outcome in good],
    }
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": errors,
        "duration_s": round(seconds, 3),
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "request_throughput": round(len(good) / seconds, 3),
        "output_throughput": round(tokens / seconds, 2),
        "total_token_throughput": round((tokens + prompts) / seconds, 2),
        "max_client_delay_ms": round(1e3 * max((o.late for o in outcomes), default=0.0), 3),
    }
    found |= {f"{name}_ms": summary(values) for name, values in samples.items()}
    if goodput:
        kept = sum(_is_within(outcome, goodput) for outcome in good)
        found["goodput"] = {"slo_ms": goodput, "request_throughput": round(kept / seconds, 3)}
    return found | {"samples": samples}


def _is_within(outcome: Outcome, limits: dict[str, float]) -> bool:
    seen = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1e3 * seen[name] <= limit for name, limit in limits.items())


async def drafting_counters(client: httpx.AsyncClient, base_url: str) -> dict[str, float] | None:
    """The counters of drafts in the server's /metrics, under any prefix; None if there are none.

    Counters of several models are added up."""
    try:
        reply = await client.get(f"{base_url}/metrics")
    except httpx.HTTPError:
        return None
    found: dict[str, float] = {}
    for _, name, labels, value in _SAMPLE.findall(reply.text):
        if name.endswith("_created"):
            continue
        position = _POSITION.search(labels)
        key = f"{name} {position[1]}" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found or None


def acceptance(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, Any] | None:
    """Draft acceptance between two readings of the counters; None if nothing was drafted.

    `mean_acceptance_length` is tokens per verify step, and `per_position` the share of verify steps
    that accepted the draft at each position."""
    if before is None or after is None:
        return None
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts, tokens = delta.get("drafts", 0.0), delta.get("draft_tokens", 0.0)
    if drafts <= 0 or tokens <= 0:
        return None
    accepted = delta.get("accepted_tokens", 0.0)
    prefix = "accepted_tokens_per_pos "
    by_position = {int(k.removeprefix(prefix)): v for k, v in delta.items() if k.startswith(prefix)}
    return {
        "drafts": drafts,
        "draft_tokens": tokens,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / tokens, 4),
        "mean_acceptance_length": round(1 + accepted / drafts, 4),
        "per_position": [round(by_position[p] / drafts, 4) for p in sorted(by_position)],
    }
