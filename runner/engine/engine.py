"""The engine joins scheduler, grammars and model runner, and keeps up to two steps in flight.

It decides only in which order things happen: the scheduler owns requests, the model runner owns
tensors. It knows nothing about processes, channels or text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...configs.schema import Config
from ..grammars.pool import GrammarPool, build_grammar_backend
from ..messages import (
    AbortRequests,
    AddRequest,
    ChangeSpeculator,
    EnginesMeet,
    Fatal,
    Progress,
    Ready,
    ResetPrefixCache,
    SetVocabulary,
    StartRanks,
    StepOutputs,
    ToWorker,
)
from ..parallel.group import RankGroup
from ..parallel.rank_processes import rendezvous_of_engines
from ..process import EngineOrders, Hosted, end_now
from ..scheduling.draft_planner import DraftPlanner, plan_drafts
from ..scheduling.kv_blocks import KVBlocks
from ..scheduling.plan import StepPlan
from ..scheduling.policy import BESIDE_DECODES, step_tokens
from ..scheduling.scheduler import Scheduler
from ..scheduling.state_snapshots import StateSnapshots
from ..scheduling.step_time import StepTimes
from ..startup.compile_ahead import start_ahead
from .lockstep import Lockstep
from .request_grammars import RequestGrammars
from .swap import DraftSwap

if TYPE_CHECKING:
    from ..batch.step_output import StepHandle
    from ..step.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_SENDING_SECONDS = 0.3  # for a last message to leave
NEWS_POLL_SECONDS = 0.02  # interval at which a wait for results checks for new messages


class Engine:
    """Serves one model. Any exception that leaves `step` is fatal for the worker."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        ready: Ready,
        max_in_flight: int,
        grammar_backend: GrammarPool | None = None,
        drafts: DraftPlanner | None = None,  # None without a drafter
        lockstep: Lockstep | None = None,  # with engines that share the experts
    ) -> None:
        self.ready = ready
        self.calls = None if lockstep is None else lockstep.socket
        self._lockstep = lockstep
        self.drafts = drafts
        self.idle_seconds, self.check = runner.idle_seconds, runner.check
        self._runner = runner
        self._swap = DraftSwap(runner, drafts, scheduler.take_news, scheduler.kv.forget_contents)
        self._scheduler = scheduler
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[StepPlan, StepHandle, list[int]]] = deque()
        # The step that has been launched up to its logits and waits for its grammar masks.
        self._forwarded: StepPlan | None = None
        self._grammars = RequestGrammars(scheduler, grammar_backend)

    def set_grammar_backend(self, backend: GrammarPool) -> None:
        """Enable structured output. The backend prepares itself in another thread."""
        self._grammars.set_backend(backend)

    def handle(self, messages: list[ToWorker]) -> None:
        """Process messages from the server, except `Shutdown`, which the worker's loop handles."""
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

    def _add(self, message: AddRequest) -> None:
        """Queue a request. A fault in it ends only this request."""
        try:
            request = self._scheduler.add(message)
            if request is not None and message.sampling.grammar is not None:
                self._grammars.compile(request, message.sampling.grammar)
        except Exception as error:
            logger.exception("request %s cannot be added", message.request_id)
            sentence = f"The request cannot be added ({type(error).__name__})."
            self._scheduler.reject(message.request_id, sentence)

    def has_work(self) -> bool:
        """True if `step` has anything to do."""
        scheduler = self._scheduler
        waits = self._in_flight or self._swap.is_busy
        if scheduler.has_requests or waits or scheduler.has_news:
            return True
        return self._lockstep is not None and self._lockstep.is_due

    def step(self, interrupted: Callable[[], bool] = lambda: False) -> list[StepOutputs]:
        """Launch the next step, then collect the results that are due.

        If `interrupted` returns True while it waits for results, it returns early, so that an abort
        need not wait for a long step; the next call resumes the wait.
        """
        self._grammars.admit_compiled()
        outputs: list[StepOutputs] = []
        launched = self._launch_next()
        if self._forwarded is not None and self._bring_in(0, outputs, interrupted):
            self._sample_forwarded(self._forwarded)
            launched = True
        if launched:
            self._bring_in(self._max_in_flight - 1, outputs, interrupted)
        elif self._in_flight and self._forwarded is None:
            self._bring_in(len(self._in_flight) - 1, outputs, interrupted)
        elif self._grammars.is_compiling and not self._in_flight:
            self._grammars.wait()
        outputs += self._swap.poll(not (launched or self._in_flight), self._forwarded is None)
        if self._scheduler.has_news:
            outputs.append(self._scheduler.take_news())
        return outputs

    def shutdown(self) -> None:
        """Wait for the steps in flight, end the grammar processes and free the model.

        If other engines share the experts, nothing waits for them, and the process must end next.
        """
        while self._in_flight and self._lockstep is None:
            _, handle, _ = self._in_flight.popleft()
            handle.get()
        self._grammars.shutdown()
        self._swap.shutdown()
        if self._lockstep is None:
            self._runner.shutdown()
        else:
            self._runner.abandon()

    # --- steps ----------------------------------------------------------------------------------

    def _launch_next(self) -> bool:
        """Launch the next step if the pipeline has room and a request can run.

        Returns True if it was launched whole. A step with a grammar is launched only up to its
        logits, since its masks need the results of the previous step: that returns False.
        """
        if self._forwarded is not None or len(self._in_flight) >= self._max_in_flight:
            return False
        plan = self._scheduler.schedule()
        if plan is None:
            return self._launch_for_others()
        wanted = None if self.drafts is None else self.drafts.complete(plan)
        if plan.has_grammar:
            self._runner.forward(plan)
            self._forwarded = plan
        else:
            self._in_flight.append((plan, self._runner.execute(plan), []))
        if wanted is not None:
            if self._lockstep is not None and plan.num_drafts:
                wanted = self._lockstep.num_drafts(wanted)
            self._scheduler.set_num_speculative_tokens(wanted)
        return not plan.has_grammar

    def _launch_for_others(self) -> bool:
        """Launch a step without rows if other engines need one, unless own rows are in flight,
        whose results may allow a step with rows."""
        if self._lockstep is None or any(plan.rows for plan, *_ in self._in_flight):
            return False
        plan = self._lockstep.plan()
        if plan is not None:
            self._in_flight.append((plan, self._runner.execute(plan), []))
        return plan is not None

    def _sample_forwarded(self, plan: StepPlan) -> None:
        """Make the grammar masks of a forwarded step and launch its sampling."""
        drafts: list[list[int]] = [[] for _ in plan.rows]
        if plan.needs_draft_ids:
            drafts = self._runner.take_draft_token_ids(plan)
        bitmask, num_cut = self._grammars.bitmask(plan, drafts, self.ready.vocab_size)
        self._in_flight.append((plan, self._runner.sample(plan, bitmask), num_cut))
        self._forwarded = None

    def _bring_in(
        self, num_left: int, outputs: list[StepOutputs], interrupted: Callable[[], bool]
    ) -> bool:
        """Land steps until `num_left` are in flight; False if interrupted before that."""
        while len(self._in_flight) > num_left:
            _, handle, _ = self._in_flight[0]
            while not handle.wait(NEWS_POLL_SECONDS):
                if interrupted():
                    return False
            landed = self._land()
            load = None if self._lockstep is None else self._lockstep.take_load()
            if load is not None:
                landed = landed or self._scheduler.take_news()
                landed.stats.expert_load = load
            if landed is not None:
                outputs.append(landed)
        return True

    def _land(self) -> StepOutputs | None:
        """Wait for the oldest step in flight and apply its results; None if it had no rows."""
        plan, handle, num_cut = self._in_flight.popleft()
        results = handle.get()
        if not plan.rows:
            return None
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
        """The token ids of each request in a step that has not been applied yet; stale rows are
        left out."""
        requests = [self._scheduler.request_of(plan.step_id, i) for i in range(len(plan.rows))]
        return [request.token_ids for request in requests if request is not None]


def build_engine(
    config: Config,
    tell: Callable[[Progress | Fatal | StartRanks | EnginesMeet], None],
    hosted: Hosted | None = None,
    orders: EngineOrders | None = None,
) -> Engine:
    """Load the model, allocate its KV cache and build an engine over it. Imports torch.

    `tell` sends a message to the server. `hosted`: see `WorkerOrders`. `orders`: the engine's place
    among those that share the experts.
    """
    group, calls, meeting = None, None, None
    if orders is None:  # as in measurements of single engines
        config = replace(config, parallel=replace(config.parallel, data_parallel_size=1))
    else:
        from ..parallel.engine_group import Calls

        meeting = rendezvous_of_engines(orders, hosted, tell)
        calls = Calls(orders, hosted)
    if config.parallel.tensor_parallel_size > 1:
        on_hang = partial(_end_with_ranks, tell)
        group = RankGroup(config, on_hang, hosted, tell, orders, meeting)
    with start_ahead(config) as ahead:
        if group is None and calls is None:
            from ..startup.build import build_model_runner

            runner = build_model_runner(config, tell, ahead)
        else:
            from .tensor_parallel import build_leader

            runner = build_leader(config, tell, ahead, group, orders, calls, meeting)
    lockstep = None
    if calls is not None:
        assert runner.sync is not None
        lockstep = Lockstep(runner.sync, calls)
    return runner.note_traffic(join(runner, config, lockstep))


def _end_with_ranks(tell: Callable[[Progress | Fatal], None], sentence: str) -> None:
    """End this process, whose main thread waits in vain for a rank that has failed."""
    tell(Fatal(sentence))
    time.sleep(_SENDING_SECONDS)
    end_now(1)


def join(runner: ModelRunner, config: Config, lockstep: Lockstep | None = None) -> Engine:
    """Build an engine over a model runner that is ready for steps."""
    facts, needs = runner.facts, runner.facts.needs
    num_drafts, lookahead = needs.num_speculative_tokens, needs.num_lookahead_tokens
    kv = KVBlocks(
        facts.kv_groups,
        facts.max_model_len,
        max_step_tokens=facts.limits.max_num_batched_tokens + lookahead,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        snapshots=(
            None
            if facts.state_group is None
            else StateSnapshots(facts.state_group, config.scheduler.enable_chunked_prefill)
        ),
    )
    is_cpu = facts.device.startswith("cpu")
    chunked, max_itl_ms = config.scheduler.enable_chunked_prefill, config.scheduler.max_itl_ms
    budget = step_tokens(facts.limits, chunked, is_cpu, num_drafts)
    times = StepTimes(max_itl_ms, is_cpu) if is_cpu or max_itl_ms is not None else None
    # Who sets the tokens of a step gets them whole, and `times` bounds steps by itself.
    is_open = config.scheduler.max_num_batched_tokens is None and times is None and chunked
    beside = BESIDE_DECODES if is_open and BESIDE_DECODES < budget else None
    if beside is not None:
        logger.info(
            "prompts take at most %d tokens of a step in which a request decodes, as "
            "--max-num-batched-tokens is not set", beside
        )  # fmt: skip
    scheduler = Scheduler(
        replace(facts.limits, max_num_batched_tokens=budget),
        kv,
        facts.max_model_len,
        num_speculative_tokens=num_drafts,
        num_lookahead_tokens=lookahead,
        chunked=chunked,
        uniform_drafts=facts.device.startswith("cuda"),
        times=times,
        beside_decodes=beside,
    )
    largest = max(facts.kv_groups, key=lambda group: group.num_blocks * group.block_size)
    ready = Ready(
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        num_blocks=largest.num_blocks,
        block_size=largest.block_size,
        eos_token_ids=list(facts.eos_token_ids),
        device=facts.device,
        dtype=facts.dtype,
        attention_backend=facts.attention_backend,
        speculative_method=config.speculative.method if num_drafts else "off",
        num_speculative_tokens=num_drafts,
        startup_seconds=dict(facts.startup_seconds),
        max_num_seqs=facts.limits.max_num_seqs,
        max_num_batched_tokens=facts.limits.max_num_batched_tokens,
        lowered_claims=list(facts.lowered_claims),
    )
    in_flight = 2 if config.scheduler.async_scheduling else 1
    drafts = plan_drafts(facts, config)
    return Engine(runner, scheduler, ready, in_flight, drafts=drafts, lockstep=lockstep)
