"""An engine without a model, for tests of the processes around it; see `build` for its tricks.

Runs in the worker process, found through PYTHONPATH: `engine="fake_engine:build"`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from slipstream.configs.schema import Config
from slipstream.runner.errors import DrafterError, RunnerError
from slipstream.runner.messages import (
    AbortRequests,
    AddRequest,
    ChangeSpeculator,
    Progress,
    Ready,
    RequestOutput,
    SetVocabulary,
    SpeculatorChanged,
    StepOutputs,
    StepStats,
    ToWorker,
)

KILL, RAISE, HANG, EXIT = 60_001, 60_002, 60_003, 60_004  # first prompt token -> what happens


class FakeEngine:
    """Counts up: one token per request and step. Says as cached tokens how many tokens it knows."""

    def __init__(self, config: Config, seconds_per_step: float) -> None:
        self.ready = Ready(
            max_model_len=config.model.max_model_len or 2048,
            vocab_size=49152,
            num_blocks=100,
            block_size=config.cache.block_size,
            eos_token_ids=[2],
            device="cpu",
            dtype="float32",
            attention_backend="reference",
            speculative_method=config.speculative.method,
            num_speculative_tokens=0,
            startup_seconds={"load": 0.0},
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            device_name=config.speculative.model or "",  # the drafter, for tests to see
        )
        self._seconds = seconds_per_step
        self._num_known = 0
        self._running: dict[str, tuple[AddRequest, int]] = {}
        self._drafter = ""  # loaded and not settled
        self._steps_left = 0  # until it is loaded
        self._answers: list[str | None] = []

    def handle(self, messages: list[ToWorker]) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, ChangeSpeculator):
                self._change(message)
            elif isinstance(message, SetVocabulary):
                self._num_known = len(message.tokens)
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)

    def _add(self, request: AddRequest) -> None:
        trick = request.prompt_token_ids[0]
        if trick == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if trick == RAISE:
            raise RuntimeError("the device is lost\nmore of it")
        if trick == EXIT:
            os._exit(3)
        if trick == HANG:
            time.sleep(600)
        self._running[request.request_id] = (request, 0)

    def _change(self, message: ChangeSpeculator) -> None:
        """A drafter called "kill:try" kills the worker when it is tried, "hang:try" stops it,
        "slow" loads slowly."""
        drafter = message.model or self._drafter
        if drafter == f"kill:{message.action}":
            os.kill(os.getpid(), signal.SIGKILL)
        if drafter == f"hang:{message.action}":
            time.sleep(600)
        if message.action == "load":
            self._drafter = message.model
            self._steps_left = 200 if message.model == "slow" else 0
        elif not self._drafter or self._steps_left:
            self._answers.append("there is nothing to " + message.action)
            return
        elif message.action != "try":
            self._drafter = ""
        if not self._steps_left:
            self._answers.append(None)

    idle_seconds = calls = None

    def check(self) -> None:
        """There are no other ranks."""

    def has_work(self) -> bool:
        return bool(self._running or self._steps_left or self._answers)

    def step(self, interrupted: Callable[[], bool]) -> list[StepOutputs]:
        time.sleep(self._seconds)
        outputs = []
        for request_id, (request, done) in list(self._running.items()):
            finished = done + 1 == request.sampling.max_tokens
            outputs.append(
                RequestOutput(
                    request_id,
                    [done + 100],
                    finish_reason="length" if finished else None,
                    num_cached_tokens=self._num_known,
                )
            )
            self._running[request_id] = (request, done + 1)
            if finished:
                del self._running[request_id]
        stats = StepStats(num_running=len(self._running), num_generated_tokens=len(outputs))
        if self._steps_left:
            self._steps_left -= 1
            self._answers += [] if self._steps_left else [None]
        told = [SpeculatorChanged(self._answers.pop(0))] if self._answers else [None]
        return [StepOutputs(outputs, stats, told[0])]

    def shutdown(self) -> None:
        if path := os.environ.get("FAKE_ENGINE_GOODBYE"):
            with open(path, "w") as file:
                file.write("bye")


def build(config: Config, progress: Callable[[Progress], None]) -> FakeEngine:
    """`hf_overrides` may hold fail (a message), exit (a status), start_seconds, step_seconds.

    `fail_after_first` is a path: the first build creates it, and later ones fail while it exists.
    A drafter whose name is a path must exist.
    """
    tricks: dict[str, Any] = json.loads(config.model.hf_overrides or "{}")
    for done in range(3):
        progress(Progress("load", done + 1, 3))
        time.sleep(tricks.get("start_seconds", 0.0) / 3)
    progress(Progress("kv_cache", 1, 1, "100 blocks"))
    if "fail" in tricks:
        raise RunnerError(tricks["fail"])
    drafter = config.speculative.model or ""
    if drafter.startswith("/") and not os.path.exists(drafter):
        raise DrafterError(f"the drafter {drafter} does not exist.")
    if "exit" in tricks:
        os._exit(tricks["exit"])
    if path := tricks.get("fail_after_first"):
        if os.path.exists(path):
            raise RunnerError("still broken")
        with open(path, "w"):
            pass
    return FakeEngine(config, tricks.get("step_seconds", 0.001))
