"""The scheduler: decides which requests get how many tokens in each step, and applies results.

It owns every request, its slot and, through `KVBlocks`, its blocks. Pure Python: it knows nothing
about tensors or text. Steps may be in flight: `schedule` works with the upper bounds in `Request`,
and `apply` lowers them to what was emitted.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from dataclasses import replace

from ...configs.schema import StepLimits
from ..grammars.grammar import GrammarMatcher
from ..messages import AddRequest, RequestOutput, StepOutputs, StepStats
from .finish import Verdict, append_tokens, count_outputs, fault, make_output, refusal, take_prompt
from .kv_blocks import KVBlocks, RequestBlocks
from .plan import NewBlocks, RowResult, ScheduledRow, StepPlan
from .policy import RequestQueue, RowInFlight, RowLimits, fill_plan, next_row, prefill_row, spread
from .prompt_turns import PromptTurns, Room, Shares
from .request import Request, RequestStatus
from .saved_states import land_state, save_state, to_border
from .step_time import StepBudget, StepTimes

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over permanent slots and paged KV.

    Running requests are served first, in (priority, arrival) order, then waiting ones; short
    prompts may overtake a long one (see `prompt_turns`). When blocks run out, the last running
    request is preempted: it releases its blocks and is recomputed later.
    """

    def __init__(
        self,
        limits: StepLimits,
        kv: KVBlocks,
        max_model_len: int,
        num_speculative_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        chunked: bool = True,
        uniform_drafts: bool = False,
        times: StepTimes | None = None,  # None: the duration of steps is not bounded
        beside_decodes: int | None = None,  # the most tokens of prompts in a step with decodes
    ) -> None:
        self.kv = kv
        self._snapshots = kv.snapshots  # None: the model has no recurrent states
        self.running, self.waiting = RequestQueue(), RequestQueue()
        self._max_tokens, self._chunked = limits.max_num_batched_tokens, chunked
        self._times = times if chunked else None
        self._beside_decodes = beside_decodes
        self._max_drafts = num_speculative_tokens
        self._num_lookahead_tokens = num_lookahead_tokens
        self._limits = RowLimits.of(
            self._max_tokens, chunked, max_model_len, num_speculative_tokens, uniform_drafts
        )
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(limits.max_num_seqs))  # a heap
        self._freed_slots: list[int] = []  # for the next plan
        self._num_grammars = 0  # unfinished requests with a compiled grammar
        self._in_flight: dict[int, list[RowInFlight]] = {}  # step id -> rows in batch order
        self._next_step_id = self._num_arrived = 0
        self._outputs: list[RequestOutput] = []  # not yet taken
        self.has_news = False  # for `take_news`: gauges changed outside a step
        self._stats = self._new_stats()

    # --- requests -------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> Request | None:
        """Queue a request. If it can never run, return None; an error output follows."""
        if message.request_id in self._requests:
            logger.error("request %s is ignored: its id is in use", message.request_id)
            return None
        request = Request.from_message(message, self._num_arrived, self._limits.max_model_len)
        self._num_arrived += 1
        if error := request.why_impossible(self._limits.max_model_len):
            self._refuse(request.request_id, error, True)
            return None
        self._requests[request.request_id] = request
        self.waiting.add(request)
        self.has_news = True
        return request

    def get(self, request_id: str) -> Request | None:
        """The unfinished request with this id, or None."""
        return self._requests.get(request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Remove requests in any state, without an output. Unknown ids are ignored."""
        for request_id in request_ids:
            if request := self._requests.get(request_id):
                self._remove(request)

    def unblock(self, request: Request, matcher: GrammarMatcher) -> None:
        """Let a request be scheduled, now that its grammar is compiled."""
        request.matcher = matcher
        request.is_blocked = False
        self._num_grammars += 1

    def fail(self, request: Request, error: str, invalid_request: bool = False) -> None:
        """End an unfinished request with an error output."""
        self._remove(request)
        self._refuse(request.request_id, error, invalid_request)

    def reject(self, request_id: str, error: str) -> None:
        """End a request that could not be added completely, with an error output."""
        if request := self._requests.get(request_id):
            self._remove(request)
        self._refuse(request_id, error)

    def _refuse(self, request_id: str, error: str, invalid_request: bool = False) -> None:
        self.has_news = True
        self._outputs.append(refusal(request_id, error, invalid_request))

    def request_of(self, step_id: int, row_index: int) -> Request | None:
        """The request of a row of a step in flight; None if the row is stale."""
        request, incarnation, _ = self._in_flight[step_id][row_index]
        return request if request.incarnation == incarnation else None

    @property
    def has_requests(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._requests)

    def set_num_speculative_tokens(self, count: int) -> None:
        """Verify up to `count` drafts per request from the next step on; at most the initial K."""
        assert 0 <= count <= self._max_drafts
        if count != self._limits.num_speculative_tokens:
            self._limits = replace(self._limits, num_speculative_tokens=count)

    # --- a step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if nothing can run until results or requests arrive."""
        plan = StepPlan(self._next_step_id)
        entries: list[RowInFlight] = []
        budget = self._new_budget()
        overtaking = self._schedule_running(plan, entries, budget)
        if overtaking is not None:
            self._schedule_waiting(plan, entries, budget, overtaking)
        if not entries:
            return None
        fill_plan(plan, entries, self._max_drafts + 1, self._num_grammars > 0)
        if self._times is not None:
            self._times.begin(plan.step_id, entries)
        plan.freed_slots, self._freed_slots = self._freed_slots, []
        self._in_flight[plan.step_id] = entries
        self._next_step_id += 1
        return plan

    def _new_budget(self) -> StepBudget:
        tokens, drafts = self._max_tokens, self._limits.num_speculative_tokens
        if self._times is None:
            return StepBudget(spread(tokens, self._beside_decodes, self.running, drafts + 1))
        return self._times.budget(tokens, self.running, drafts, bool(self.waiting))

    def _schedule_running(
        self, plan: StepPlan, entries: list[RowInFlight], budget: StepBudget
    ) -> Shares | None:
        """Schedule running requests; None if there were too few blocks for all of them.

        Otherwise returns the waiting requests that overtake a prompt, and the tokens of each.
        """
        num_preemptions, limits = self._stats.num_preemptions, self._limits.of_step(self.running)
        running = list(self.running)
        turns: PromptTurns | None = None
        for index, request in enumerate(running):
            blocks = request.blocks
            if budget.tokens <= 0 or blocks is None:
                break  # a preempted request, and so all after it are preempted, too
            if request.num_prefilled < request.prefill_len:
                if turns is None:
                    turns = self._turns(running, index, budget)
                available = turns.take(request)
                if self._snapshots is not None:
                    available = to_border(self._snapshots, request, available)
            elif request.request_id in budget.resting:
                continue
            else:  # leave one token for each later request
                available = max(1, budget.tokens - (len(running) - 1 - index))
                if turns is not None:
                    turns.pass_decode()
            row = next_row(request, limits, available) if available else None
            if row is None:
                continue
            end = row.num_computed_tokens + row.num_tokens + self._num_lookahead_tokens
            if end > blocks.capacity or request.num_confirmed_tokens >= blocks.slides_at:
                new_blocks = self._make_room(request, blocks, row)
                if new_blocks is None:
                    return None
                if any(new_blocks):
                    plan.new_blocks.append(NewBlocks(request.slot, new_blocks))
            self._commit(request, row, plan, entries)
            budget.tokens -= row.num_tokens
        was_short = self._stats.num_preemptions != num_preemptions
        return None if was_short else {} if turns is None else turns.overtaking

    def _turns(self, running: list[Request], index: int, budget: StepBudget) -> PromptTurns:
        """Share the step among prompts, of which `running[index]` is the first."""
        turns = PromptTurns(budget, running[index + 1 :], self._limits.num_speculative_tokens + 1)
        room = Room(self.kv, len(self._free_slots), self._num_lookahead_tokens)
        turns.share(running[index], self.waiting, room)
        return turns

    def _make_room(
        self, request: Request, blocks: RequestBlocks, row: ScheduledRow
    ) -> list[list[int]] | None:
        """Extend the request's blocks for a row, preempting from the end of the running queue.

        Returns None if the request itself is the last: it is preempted, or if it has rows in
        flight, it waits for them.
        """
        if request.num_confirmed_tokens >= blocks.slides_at:
            self.kv.slide(blocks, request.num_confirmed_tokens)
        while (new_blocks := self.kv.extend(blocks, self._end(row))) is None:
            victim = self.running[-1]
            if victim is request and request.num_rows_in_flight:
                return None  # the rows in flight may release blocks
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _end(self, row: ScheduledRow) -> int:
        """Number of tokens that need KV blocks for this row, including the drafts' lookahead."""
        lookahead = 0 if row.is_prefill else self._num_lookahead_tokens
        return min(row.num_computed_tokens + row.num_tokens + lookahead, self._limits.max_model_len)

    def _commit(
        self, request: Request, row: ScheduledRow, plan: StepPlan, entries: list[RowInFlight]
    ) -> None:
        """Add a row to the step and to the request's bounds."""
        if self._snapshots is not None:
            save_state(self._snapshots, request, row, plan)
        request.begin(row)
        entries.append((request, request.incarnation, row))

    def _schedule_waiting(
        self, plan: StepPlan, entries: list[RowInFlight], budget: StepBudget, overtaking: Shares
    ) -> None:
        """Admit those that overtake a prompt; without any, all in order until one does not fit."""
        for request in list(overtaking or self.waiting):
            if not self._free_slots or (budget.is_spent and not overtaking):
                return
            tokens = overtaking.get(request)
            if request.is_blocked or tokens == 0:
                continue
            row = self._admit(request, plan, budget, tokens)
            if row is None:
                return
            self._commit(request, row, plan, entries)
            budget.tokens -= row.num_tokens

    def _admit(
        self, request: Request, plan: StepPlan, budget: StepBudget, tokens: int | None
    ) -> ScheduledRow | None:
        """Give a waiting request a slot and blocks for its first row; None if it must wait.

        Blocks are allocated chunk by chunk, but all of its known tokens must fit now. Otherwise
        half-prefilled requests would preempt one another.
        `tokens`: those of its first row, if that is decided.
        """
        known = len(request.token_ids)
        if request.wants_prompt_logprobs:
            match = self.kv.no_match()  # log probabilities need every prompt position computed
        else:
            match = self.kv.match(request.hashes, known)
        if not self._chunked and known - match.num_tokens > budget.tokens:
            return None
        if not self.kv.can_admit(match, known + self._num_lookahead_tokens):
            return None
        left, wants = known - match.num_tokens, request.wants_prompt_logprobs
        tokens = tokens or budget.of_prompt(left, match.num_tokens, wants, budget.tokens)
        if not tokens:
            return None
        self.waiting.remove(request)
        self.running.add(request)
        request.enter(heapq.heappop(self._free_slots), match.num_tokens)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            if not request.wants_prompt_logprobs:
                self._stats.prefix_cache_queries += known
                self._stats.prefix_cache_hits += match.num_tokens
        request.blocks = self.kv.admit(match)
        if self._snapshots is not None:
            tokens = to_border(self._snapshots, request, tokens)
        row = prefill_row(request, tokens)
        fits = self.kv.extend(request.blocks, self._end(row))
        assert fits is not None, "can_admit said that it fits"
        plan.new_requests.append(request.new_request(match.snapshot))
        return row

    def _preempt(self, request: Request) -> None:
        """Move a running request back to the waiting queue. Its published blocks stay cached."""
        self._vacate(request)
        request.wait_again()
        self.waiting.add(request)
        self._stats.num_preemptions += 1

    def _remove(self, request: Request) -> None:
        """Remove a request in any state."""
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._num_grammars -= request.matcher is not None
        del self._requests[request.request_id]
        self.has_news = True

    def _vacate(self, request: Request) -> None:
        """Release a request's slot and blocks.

        Steps in flight may still write to them. That is safe: they do so before any later step, and
        only at positions that were never published.
        """
        assert request.blocks is not None
        self.running.remove(request)
        self.kv.release(request.blocks)
        request.blocks = None
        self._freed_slots.append(request.slot)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1
        request.incarnation += 1

    # --- results --------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, results: list[RowResult]) -> StepOutputs:
        """Apply the results of the oldest step in flight and return its outputs."""
        assert plan.step_id == next(iter(self._in_flight)), "steps are applied in order"
        entries = self._in_flight.pop(plan.step_id)
        if self._times is not None:
            self._times.end(plan.step_id)
        for (request, incarnation, row), result in zip(entries, results, strict=True):
            if request.incarnation == incarnation:
                self._apply_row(request, row, result)
        return self.take_news()

    def _apply_row(self, request: Request, row: ScheduledRow, result: RowResult) -> None:
        if row.num_computed_tokens < request.prompt_len:
            self._stats.num_prompt_tokens += take_prompt(request, row, result)
        if (failed := fault(request, result)) is not None:
            self._report(request, result, failed)
            return
        if row.is_prefill:
            request.num_chunks_in_flight -= 1
            verdict, num_valid = None, row.num_computed_tokens + row.num_tokens
        else:
            most = row.num_draft_tokens + 1
            assert 1 <= len(result.token_ids) <= most
            request.num_sampling_in_flight -= 1
            request.num_placeholders -= most
            verdict = append_tokens(request, result.token_ids)
            assert verdict.num_kept <= result.num_draft_tokens + 1
            # The newest token has no KV yet. If the output was cut, KV after it must not be cached.
            num_valid = len(request.token_ids) - 1
        num_valid -= row.num_behind
        request.num_confirmed_tokens = num_valid
        blocks = request.blocks
        assert blocks is not None
        if num_valid >= blocks.publishes_at:
            self.kv.publish(blocks, request.hashes, num_valid)
        if self._snapshots is not None:
            land_state(self._snapshots, request, row, verdict.num_kept if verdict else 0)
        if verdict is not None:
            self._report(request, result, verdict)

    def _report(self, request: Request, result: RowResult, verdict: Verdict) -> None:
        """Output a row's kept tokens, and remove the request if it has ended."""
        self._outputs.append(make_output(request, result, verdict))
        if verdict.finish_reason is not None:
            self._remove(request)

    def take_news(self) -> StepOutputs:
        """Take the outputs and statistics gathered since the last call.

        Outside a step these are errors, and gauges that aborts changed.
        """
        stats, self._stats = self._stats, self._new_stats()
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.kv_cache_usage = self.kv.usage
        outputs, self._outputs = self._outputs, []
        count_outputs(stats, outputs)
        self.has_news = False
        return StepOutputs(outputs, stats)

    def _new_stats(self) -> StepStats:
        return StepStats(accepted_per_pos=[0] * self._max_drafts)
