"""The engine joins scheduler, grammars and model runner: it keeps up to two steps in flight.

It owns the order in which things happen, and nothing else: requests are the scheduler's, tensors
the model runner's. It knows nothing about processes, channels or text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..configs.schema import Config
from .draft_planner import DraftPlanner, plan_drafts
from .draft_swap import DraftSwap, ExchangesDrafter
from .grammar import (
    ALL_ALLOWED,
    GrammarBackend,
    GrammarMatcher,
    build_grammar_backend,
    fill_rows,
)
from .kv_blocks import BlockGroup, KVBlocks
from .messages import (
    AbortRequests,
    AddRequest,
    ChangeSpeculator,
    GrammarSpec,
    Progress,
    Ready,
    ResetPrefixCache,
    SetVocabulary,
    StepOutputs,
    ToWorker,
)
from .plan import RowResult, StepPlan
from .request import Request
from .schedule_policy import step_tokens
from .scheduler import Scheduler
from .start_ahead import start_ahead

if TYPE_CHECKING:
    from ..speculators.base import SpeculatorNeeds

logger = logging.getLogger(__name__)

COMPILE_POLL_SECONDS = 0.02  # how long an otherwise idle step waits for a grammar
NEWS_POLL_SECONDS = 0.02  # how often a step that waits for results asks whether messages wait
MAX_COMPILE_SECONDS = 30.0  # a grammar that takes longer is refused


class Handle(Protocol):
    """Results of a launched step."""

    def wait(self, timeout: float) -> bool:
        """True once `get` waits no longer than a copy takes; False if `timeout` seconds pass."""

    def get(self) -> list[RowResult]:
        """Wait for them: one per row of the plan, in its order. Raises what the step raised."""


class RunnerFacts(Protocol):
    """What a model runner tells about itself once it is ready."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_groups(self) -> Sequence[BlockGroup]: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def attention_backend(self) -> str: ...

    @property
    def needs(self) -> SpeculatorNeeds: ...

    @property
    def startup_seconds(self) -> dict[str, float]: ...

    @property
    def step_seconds(self) -> dict[tuple[int, int], float]: ...

    @property
    def lowered_claims(self) -> Sequence[str]: ...


class ModelRunner(ExchangesDrafter, Protocol):
    """What the engine needs of the model runner. Steps run in the order of their launch."""

    @property
    def facts(self) -> RunnerFacts: ...

    def execute(self, plan: StepPlan) -> Handle:
        """Launch a whole step."""

    def forward(self, plan: StepPlan) -> None:
        """Launch a step up to its logits; `sample` must follow before any other launch."""

    def take_draft_token_ids(self, plan: StepPlan) -> list[list[int]]:
        """Real ids of the drafts that each row of the plan will verify; -1 where there is none.

        Waits for the step that made them. Called between `forward` and `sample`, and only if
        `plan.needs_draft_ids`.
        """

    def sample(self, plan: StepPlan, grammar_bitmask: np.ndarray | None) -> Handle:
        """Launch the rest of the step.

        `grammar_bitmask` is [L, ceil(V / 32)] int32: for each row of the plan one line per draft
        that `take_draft_token_ids` listed (-1 included), and one more.
        """

    def shutdown(self) -> None:
        """Free everything."""


class Engine:
    """One model being served. Any exception out of `step` is fatal for the worker."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        ready: Ready,
        max_in_flight: int,
        grammar_backend: GrammarBackend | None = None,
        drafts: DraftPlanner | None = None,  # None: no drafter
    ) -> None:
        self.ready = ready
        self.drafts = drafts
        self._runner = runner
        self._swap = DraftSwap(runner, drafts, scheduler.take_news)
        self._scheduler = scheduler
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[StepPlan, Handle, list[int]]] = deque()
        self._forwarded: StepPlan | None = None  # launched up to its logits, which wait for a mask
        self._grammar_backend = grammar_backend
        # request id -> its grammar, and when it must be there (time.monotonic())
        self._compiling: dict[str, tuple[Future[GrammarMatcher], float]] = {}

    def set_grammar_backend(self, backend: GrammarBackend) -> None:
        """Make structured output possible; the backend prepares itself off this thread."""
        self._grammar_backend = backend
        backend.prepare()

    def handle(self, messages: list[ToWorker]) -> None:
        """Take in messages of the server. `Shutdown` is the worker's business."""
        for message in messages:
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequests(request_ids):
                    self._scheduler.abort(request_ids)
                case ResetPrefixCache():
                    self._scheduler.kv.reset_prefix_cache()
                case ChangeSpeculator():
                    self._swap.start(message)
                case SetVocabulary(tokens, eos_token_ids):
                    eos = sorted({*eos_token_ids, *self.ready.eos_token_ids})
                    vocab_size = self.ready.vocab_size
                    self.set_grammar_backend(build_grammar_backend(tokens, "raw", eos, vocab_size))

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        scheduler = self._scheduler
        waits = self._in_flight or self._swap.is_busy
        return bool(scheduler.has_requests or waits or scheduler.has_news)

    def step(self, interrupted: Callable[[], bool] = lambda: False) -> list[StepOutputs]:
        """Launch the next step, then bring in what has to be brought in.

        Returns before that if `interrupted` while it waits for results, so that an abort need not
        wait for a long step; the next call goes on with it.
        """
        self._admit_compiled()
        outputs: list[StepOutputs] = []
        launched = self._launch_next()
        if self._forwarded is not None and self._bring_in(0, outputs, interrupted):
            self._sample_forwarded(self._forwarded)
            launched = True
        if launched:
            self._bring_in(self._max_in_flight - 1, outputs, interrupted)
        elif self._in_flight and self._forwarded is None:
            self._bring_in(len(self._in_flight) - 1, outputs, interrupted)
        elif self._compiling and not self._in_flight:
            futures = [future for future, _ in self._compiling.values()]
            wait(futures, COMPILE_POLL_SECONDS, "FIRST_COMPLETED")
        outputs += self._swap.poll(not (launched or self._in_flight), self._forwarded is None)
        if self._scheduler.has_news:
            outputs.append(self._scheduler.take_news())
        return outputs

    def shutdown(self) -> None:
        """Let steps in flight end and free the model."""
        while self._in_flight:
            _, handle, _ = self._in_flight.popleft()
            handle.get()
        if self._grammar_backend is not None:
            self._grammar_backend.shutdown()
        self._swap.shutdown()
        self._runner.shutdown()

    # --- steps ----------------------------------------------------------------------------------

    def _launch_next(self) -> bool:
        """Start the next step if there is room for one and something to do.

        With a grammar in it, its masks need the results of the step before: False for now.
        """
        if self._forwarded is not None or len(self._in_flight) >= self._max_in_flight:
            return False
        plan = self._scheduler.schedule()
        if plan is None:
            return False
        if self.drafts is not None:
            self._scheduler.set_num_speculative_tokens(self.drafts.complete(plan))
        if plan.has_grammar:
            self._runner.forward(plan)
            self._forwarded = plan
            return False
        self._in_flight.append((plan, self._runner.execute(plan), []))
        return True

    def _sample_forwarded(self, plan: StepPlan) -> None:
        """Start the rest of a step whose masks can be made now."""
        bitmask, num_cut = self._grammar_bitmask(plan)
        self._in_flight.append((plan, self._runner.sample(plan, bitmask), num_cut))
        self._forwarded = None

    def _bring_in(
        self, num_left: int, outputs: list[StepOutputs], interrupted: Callable[[], bool]
    ) -> bool:
        """Land steps until so many are in flight; False if interrupted before."""
        while len(self._in_flight) > num_left:
            _, handle, _ = self._in_flight[0]
            while not handle.wait(NEWS_POLL_SECONDS):
                if interrupted():
                    return False
            outputs.append(self._land())
        return True

    def _land(self) -> StepOutputs:
        """Wait for the oldest step in flight and apply its results."""
        plan, handle, num_cut = self._in_flight.popleft()
        results = handle.get()
        for result, cut in zip(results, num_cut, strict=False):
            result.num_draft_tokens -= cut  # drafts that a grammar forbade were not verified
        if self.drafts is None:
            return self._scheduler.apply(plan, results)
        self.drafts.land(plan, results, lambda: self._texts(plan))
        outputs = self._scheduler.apply(plan, results)
        self.drafts.tell(plan, outputs.stats)
        if not self._scheduler.has_requests:
            self.drafts.rest()
        return outputs

    def _texts(self, plan: StepPlan) -> list[Sequence[int]]:
        """The tokens of the requests in a step that has not been applied."""
        requests = [self._scheduler.request_of(plan.step_id, i) for i in range(len(plan.rows))]
        return [request.token_ids for request in requests if request is not None]

    def _grammar_request(self, plan: StepPlan, index: int) -> Request | None:
        """Whose row this is if a grammar masks it: not a prefill chunk, and not stale."""
        request = self._scheduler.request_of(plan.step_id, index)
        if request is None or request.matcher is None or plan.rows[index].is_prefill:
            return None
        return request

    def _grammar_bitmask(self, plan: StepPlan) -> tuple[np.ndarray, list[int]]:
        """One mask line per logits row, and for each row of the plan how many drafts it cuts."""
        drafts: list[list[int]] = [[] for _ in plan.rows]
        if plan.needs_draft_ids:
            drafts = self._runner.take_draft_token_ids(plan)
        shape = (sum(len(ids) + 1 for ids in drafts), -(-self.ready.vocab_size // 32))
        bitmask = np.full(shape, ALL_ALLOWED, dtype=np.int32)
        num_cut, start = [], 0
        for index, ids in enumerate(drafts):
            lines = bitmask[start : start + len(ids) + 1]
            num_cut.append(self._fill_row(plan, index, ids, lines))
            start += len(ids) + 1
        return bitmask, num_cut

    def _fill_row(self, plan: StepPlan, index: int, ids: list[int], lines: np.ndarray) -> int:
        """Mask one row of the plan; a fault in its grammar ends its request alone."""
        request = self._grammar_request(plan, index)
        if request is None or request.matcher is None:
            return 0
        try:
            return fill_rows(request.matcher, ids, lines)
        except Exception as error:
            logger.exception("the grammar of %s failed", request.request_id)
            self._scheduler.fail(request, f"The grammar failed: {error}")
            return 0

    # --- grammars -------------------------------------------------------------------------------

    def _add(self, message: AddRequest) -> None:
        request = self._scheduler.add(message)
        if request is None or message.sampling.grammar is None:
            return
        self._compile(request, message.sampling.grammar)

    def _compile(self, request: Request, spec: GrammarSpec) -> None:
        """Compile off the loop; the request stays unscheduled until `_admit_compiled`."""
        if self._grammar_backend is None:
            self._scheduler.fail(request, "Structured output is not available for this model.")
            return
        deadline = time.monotonic() + MAX_COMPILE_SECONDS
        self._compiling[request.request_id] = (self._grammar_backend.compile(spec), deadline)

    def _admit_compiled(self) -> None:
        for request_id, (future, deadline) in list(self._compiling.items()):
            request = self._scheduler.get(request_id)
            if request is None:  # aborted meanwhile
                future.cancel()
            elif future.done():
                self._unblock(request, future)
            elif time.monotonic() > deadline:
                future.cancel()
                self._scheduler.fail(request, "The grammar takes too long to compile.", True)
            else:
                continue
            del self._compiling[request_id]

    def _unblock(self, request: Request, future: Future[GrammarMatcher]) -> None:
        """A grammar that does not compile ends its request alone."""
        try:
            matcher = future.result()
        except Exception as error:
            logger.info("grammar of %s: %s", request.request_id, error)
            is_theirs = isinstance(error, ValueError)
            self._scheduler.fail(request, f"The grammar cannot be compiled: {error}", is_theirs)
            return
        self._scheduler.unblock(request, matcher)


def build_engine(config: Config, progress: Callable[[Progress], None]) -> Engine:
    """Load the model, allocate its KV cache and join it with a scheduler. Imports torch."""
    with start_ahead(config) as ahead:
        from .model_runner import build_model_runner

        runner = build_model_runner(config, progress, ahead)
    return runner.note_traffic(join(runner, config))


def join(runner: ModelRunner, config: Config) -> Engine:
    """An engine over a runner that is ready."""
    facts, needs = runner.facts, runner.facts.needs
    num_drafts, lookahead = needs.num_speculative_tokens, needs.num_lookahead_tokens
    kv = KVBlocks(
        facts.kv_groups,
        facts.max_model_len,
        max_step_tokens=config.scheduler.max_num_batched_tokens + lookahead,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        drop_last_matched_block=needs.drop_last_matched_block,
    )
    budget = step_tokens(config.scheduler, facts.device.startswith("cpu"), num_drafts)
    scheduler = Scheduler(
        replace(config.scheduler, max_num_batched_tokens=budget),
        kv,
        facts.max_model_len,
        num_speculative_tokens=num_drafts,
        num_lookahead_tokens=lookahead,
        uniform_drafts=facts.device.startswith("cuda"),
    )
    ready = Ready(
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        num_blocks=facts.kv_groups[0].num_blocks,
        block_size=facts.kv_groups[0].block_size,
        eos_token_ids=list(facts.eos_token_ids),
        device=facts.device,
        dtype=facts.dtype,
        attention_backend=facts.attention_backend,
        speculative_method=config.speculative.method if num_drafts else "off",
        num_speculative_tokens=num_drafts,
        startup_seconds=dict(facts.startup_seconds),
        lowered_claims=list(facts.lowered_claims),
    )
    in_flight = 2 if config.scheduler.async_scheduling else 1
    return Engine(runner, scheduler, ready, in_flight, drafts=plan_drafts(facts, config))
