"""Owns the grammars of the engine's requests: compiles them while the requests wait, fills masks.

A fault in a grammar ends only the request that brought it.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, wait

import numpy as np

from ..grammars.grammar import ALL_ALLOWED, GrammarMatcher, GrammarTooSlow, MaskJob
from ..grammars.pool import GrammarPool
from ..messages import GrammarSpec
from ..scheduling.plan import StepPlan
from ..scheduling.request import Request
from ..scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

COMPILE_POLL_SECONDS = 0.02  # how long an otherwise idle step waits for a grammar
# The backend refuses a grammar that takes too long to compile, and blames the request. After this
# wait the queue is to blame: other grammars were compiled first.
MAX_WAIT_SECONDS = 60.0
BUSY_ERROR = "The server was too busy with other grammars to compile this one; try again later."


class RequestGrammars:
    """The grammars of one scheduler's requests. Without a backend, requests with a grammar fail."""

    def __init__(self, scheduler: Scheduler, backend: GrammarPool | None = None) -> None:
        self._scheduler = scheduler
        self._backend = backend
        # request id -> its grammar, and when it must be there (time.monotonic())
        self._compiling: dict[str, tuple[Future[GrammarMatcher], float]] = {}

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def set_backend(self, backend: GrammarPool) -> None:
        """Enable structured output. The backend prepares itself in another thread."""
        self._backend = backend
        backend.prepare()

    def compile(self, request: Request, spec: GrammarSpec) -> None:
        """Start compiling in the background.

        The request is not scheduled until `admit_compiled`.
        """
        if self._backend is None:
            self._scheduler.fail(request, "Structured output is not available for this model.")
            return
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        self._compiling[request.request_id] = (self._backend.compile(spec), deadline)

    def wait(self) -> None:
        """Wait briefly for a grammar; called by a step that has nothing else to do."""
        futures = [future for future, _ in self._compiling.values()]
        wait(futures, COMPILE_POLL_SECONDS, "FIRST_COMPLETED")

    def admit_compiled(self) -> None:
        """Let requests run once their grammars are compiled, and fail those that waited too
        long."""
        for request_id, (future, deadline) in list(self._compiling.items()):
            request = self._scheduler.get(request_id)
            if request is None:  # aborted meanwhile
                future.cancel()
            elif future.done():
                self._unblock(request, future)
            elif time.monotonic() > deadline:
                future.cancel()
                self._scheduler.fail(request, BUSY_ERROR)
            else:
                continue
            del self._compiling[request_id]

    def bitmask(
        self, plan: StepPlan, drafts: list[list[int]], vocab_size: int
    ) -> tuple[np.ndarray, list[int]]:
        """Fill the grammar masks of a step.

        `drafts` holds the draft ids that each row of the plan verifies. Returns the mask, [L,
        ceil(V / 32)] int32 with one line per logits row, and for each row of the plan the number of
        real drafts that are cut, from the first one that its grammar forbids.
        """
        shape = (sum(len(ids) + 1 for ids in drafts), -(-vocab_size // 32))
        bitmask = np.full(shape, ALL_ALLOWED, dtype=np.int32)
        jobs: list[tuple[int, Request, MaskJob]] = []
        start = 0
        for index, ids in enumerate(drafts):
            lines = bitmask[start : start + len(ids) + 1]
            start += len(ids) + 1
            request = self._masked_request(plan, index)
            if request is not None and request.matcher is not None:
                jobs.append((index, request, MaskJob(request.matcher, ids, lines)))
                request.mask_lines = lines
        num_cut = [0] * len(drafts)
        if jobs and self._backend is not None:
            self._backend.fill([job for _, _, job in jobs])
        for index, request, job in jobs:
            num_cut[index] = job.num_cut
            if job.error is not None:
                self._end(request, job.error)
        return bitmask, num_cut

    def shutdown(self) -> None:
        if self._backend is not None:
            self._backend.shutdown()

    def _masked_request(self, plan: StepPlan, index: int) -> Request | None:
        """The request of a row if a grammar masks it; None for prefill chunks and stale rows."""
        request = self._scheduler.request_of(plan.step_id, index)
        if request is None or request.matcher is None or plan.rows[index].is_prefill:
            return None
        return request

    def _end(self, request: Request, error: Exception) -> None:
        """End a request because filling its mask failed; a slow grammar is the client's fault."""
        is_client_fault = isinstance(error, GrammarTooSlow)
        log = logger.info if is_client_fault else logger.error
        log("the grammar of %s failed: %r", request.request_id, error)
        self._scheduler.fail(request, f"The grammar failed: {error}.", is_client_fault)

    def _unblock(self, request: Request, future: Future[GrammarMatcher]) -> None:
        """Let a request run with its compiled grammar, or end it if compiling failed."""
        try:
            matcher = future.result()
        except Exception as error:
            logger.info("grammar of %s: %s", request.request_id, error)
            is_client_fault = isinstance(error, ValueError)
            self._scheduler.fail(
                request, f"The grammar cannot be compiled: {error}", is_client_fault
            )
            return
        self._scheduler.unblock(request, matcher)
