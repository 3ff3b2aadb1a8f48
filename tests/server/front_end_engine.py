"""An engine without a model that speaks at a given pace, to load the server alone.

Every request gets its own prompt's tokens again and again, `tokens_per_step` of them a step, all
requests in one message a step, as the real engine sends them. Runs in the worker process, found
through PYTHONPATH: `SLIPSTREAM_TEST_ENGINE=front_end_engine:build`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from slipstream.configs.schema import Config
from slipstream.runner.messages import (
    AbortRequests,
    AddRequest,
    Progress,
    Ready,
    RequestOutput,
    StepOutputs,
    StepStats,
    ToWorker,
)


class PacedEngine:
    """Steps begin `seconds_per_step` apart; a late one does not shorten the next ones' distance.

    It waits until `num_streams` requests are there, so that all of them speak from the first step.
    """

    def __init__(self, config: Config, pace: dict[str, Any]) -> None:
        self._tokens = pace.get("tokens_per_step", 1)
        self._seconds = pace.get("seconds_per_step", 0.0)
        self._wanted = pace.get("num_streams", 1)
        self._running: dict[str, tuple[AddRequest, int]] = {}
        self._next = 0.0
        self._spoken = False
        drafts = self._tokens - 1
        self.ready = Ready(
            max_model_len=config.model.max_model_len or 8192,
            vocab_size=49152,
            num_blocks=1000,
            block_size=config.cache.block_size,
            eos_token_ids=[2],
            device="cpu",
            dtype="float32",
            attention_backend="reference",
            speculative_method="ngram" if drafts else "off",
            num_speculative_tokens=drafts,
            startup_seconds={"load": 0.0},
            max_num_seqs=64,
            max_num_batched_tokens=2048,
        )

    def handle(self, messages: list[ToWorker]) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                self._running[message.request_id] = (message, 0)
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)
        self._spoken = self._spoken and bool(self._running)

    idle_seconds = calls = None

    def check(self) -> None:
        """There are no other ranks."""

    def has_work(self) -> bool:
        return bool(self._running) and (self._spoken or len(self._running) >= self._wanted)

    def step(self, interrupted: Callable[[], bool]) -> list[StepOutputs]:
        now = time.monotonic()
        self._next = max(self._next, now) if self._spoken else now
        self._spoken = True
        time.sleep(max(0.0, self._next - now))
        self._next += self._seconds
        outputs = []
        for request_id, (request, done) in list(self._running.items()):
            count = min(self._tokens, request.sampling.max_tokens - done)
            prompt = request.prompt_token_ids
            output = RequestOutput(
                request_id,
                [prompt[(done + i) % len(prompt)] for i in range(count)],
                num_draft_tokens=self._tokens - 1,
                num_accepted_tokens=count - 1,
            )
            self._running[request_id] = (request, done + count)
            if done + count == request.sampling.max_tokens:
                output.finish_reason = "length"
                del self._running[request_id]
            outputs.append(output)
        self._spoken = bool(self._running)
        generated = sum(len(output.token_ids) for output in outputs)
        return [StepOutputs(outputs, self._stats(len(outputs), generated))]

    def _stats(self, rows: int, generated: int) -> StepStats:
        stats = StepStats(num_running=rows, num_generated_tokens=generated)
        if self._tokens == 1:
            stats.num_plain_steps = rows
            return stats
        stats.num_drafts = rows
        stats.num_draft_tokens = rows * (self._tokens - 1)
        stats.num_accepted_tokens = generated - rows
        stats.accepted_per_pos = [rows] * (self._tokens - 1)
        return stats

    def shutdown(self) -> None:
        pass


def build(config: Config, progress: Callable[[Progress], None]) -> PacedEngine:
    """`hf_overrides` holds num_streams, tokens_per_step and seconds_per_step."""
    return PacedEngine(config, json.loads(config.model.hf_overrides or "{}"))
