"""Adds to each step plan how many drafts to make after it, and whether the drafter may skip it.

It passes step results to the controller, and counts the tokens that the drafter has not processed.
Host numbers only: nothing here waits for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from ...configs.schema import Config, StepLimits
from ...speculators.draft_length.controller import DraftController
from ...speculators.draft_length.step_costs import StepCosts
from ...speculators.draft_length.watchdog import Watchdog
from ..messages import StepStats
from .plan import NewRequest, RowResult, ScheduledRow, StepPlan

if TYPE_CHECKING:
    from ...speculators.base import SpeculatorNeeds

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0  # between two lines about K
_PROMPT_RATE = 0.2  # weight of a step's prompts in their running mean: the next step's are unknown
_LASTING_REASONS = ("gain", "no_gain", "unhealthy")


class DraftPlanner:
    """One engine's drafts. Arrays are indexed by slot."""

    def __init__(
        self,
        controller: DraftController,
        max_num_reqs: int,
        max_deferred_tokens: int,
        trims: bool,
        clock: Callable[[], float] = time.perf_counter,
        learns: bool = True,
        may_defer: bool = True,
    ) -> None:
        """`max_deferred_tokens`: how many tokens of a request the drafter may leave unprocessed; 0
        if it keeps no KV of its own, so that it may skip any number of steps.

        `trims`: a row that was scheduled for a draft but has none costs nothing.
        `learns`: K is chosen by acceptance and cost; False for a fixed K, which needs neither.
        Without `may_defer` the drafter takes part in every step, as other ranks' passes need it.
        `clock` is in seconds; step durations are measured with it.
        """
        self.controller = controller
        self._max_deferred = max_deferred_tokens
        self._defers = may_defer
        self._trims = trims
        self._clock = clock
        self._learns = learns
        self._deferred = [0] * max_num_reqs
        self._was_deferred = False  # some of them may be above 0
        self._since = [0] * max_num_reqs  # the step in which the slot's request entered
        self._entered_at = 0  # the newest of them
        self._landed_at: float | None = None  # when the last step landed; None = the engine slept
        # Requests, seconds and whether drafts took part, of a step that `tell` has yet to report.
        self._timed: tuple[int, float, bool] | None = None
        self._prompt_rows = 0.0  # running mean of the tokens of prompts in a step
        self._num_drafts = 0  # of the newest step with requests that decode
        self._troubles: dict[str, int] = {}  # reported so far
        self._logged = -1  # the last K that was logged
        self._log_at = float("-inf")

    def complete(self, plan: StepPlan) -> int:
        """Choose K, and fill in the fields of `plan` that concern drafts; call once for each step.

        Returns how many drafts a request may have in the next step. For a step of prefill chunks
        only, that is K of the last step with other rows.
        """
        for new in plan.new_requests:
            self._enter(new, plan.step_id)
        slots = [row.slot for row in plan.rows if not row.is_prefill]
        num_prompt_rows = _prompt_rows(plan.rows)
        self._prompt_rows += _PROMPT_RATE * (num_prompt_rows - self._prompt_rows)
        # The drafts are verified in the next step. One prompt between decodes promises no other.
        chosen = self.controller.choose(slots, min(self._prompt_rows, num_prompt_rows))
        plan.num_drafts, plan.draft_reason = chosen.num_drafts, chosen.reason
        if chosen.limits is not None:
            limits = dict(zip(slots, chosen.limits, strict=True))
            for row in plan.rows:
                row.next_drafts = limits.get(row.slot)
        plan.defers_drafter = self._may_defer(plan)
        self._note_deferred(plan)
        if slots:
            self._log(plan, len(slots))
            self._num_drafts = chosen.num_drafts
        return self._num_drafts  # requests that were not in this step keep their drafts

    def _note_deferred(self, plan: StepPlan) -> None:
        """Fill in how many tokens of each row's request the drafter has not processed."""
        defers = plan.defers_drafter and self._max_deferred > 0
        if not defers and not self._was_deferred:
            return
        deferred = self._deferred
        for row in plan.rows:
            slot = row.slot
            row.num_deferred = deferred[slot]
            deferred[slot] = row.num_behind = row.num_deferred + row.num_tokens if defers else 0
        self._was_deferred = defers or any(deferred)

    def land(
        self, plan: StepPlan, results: Sequence[RowResult], texts: Callable[[], list[Sequence[int]]]
    ) -> None:
        """Learn acceptance and the step's duration from its results, one for each of its rows.

        `texts` returns the tokens of its requests. It is called only if the watchdog wants them.
        """
        rows, results = self._sampling_rows(plan, results)
        if not self._trims:  # a row without a draft costs as much as one with a wrong draft
            counts = [row.num_draft_tokens for row in rows]
        else:
            counts = [result.num_draft_tokens for result in results]
        accepted = [len(ids) - 1 if (ids := result.token_ids) else 0 for result in results]
        self._watch(results, accepted, texts)
        if not self._learns:
            return
        self.controller.observe([row.slot for row in rows], counts, accepted)
        now = self._clock()
        if self._landed_at is not None:
            if len(rows) == len(plan.rows) and not _prompt_rows(plan.rows):
                self._refine(plan, sum(counts), now - self._landed_at)
            else:
                self._learn_prompts(plan, sum(counts), now - self._landed_at)
        self._landed_at = now

    def _sampling_rows(
        self, plan: StepPlan, results: Sequence[RowResult]
    ) -> tuple[Sequence[ScheduledRow], Sequence[RowResult]]:
        """The rows that sample, and their results; without requests that have lost their slot."""
        assert len(plan.rows) == len(results)
        since, step_id = self._since, plan.step_id
        if self._entered_at <= step_id and not any([row.is_prefill for row in plan.rows]):
            return plan.rows, results
        chosen = [
            (row, result)
            for row, result in zip(plan.rows, results, strict=True)
            if not row.is_prefill and since[row.slot] <= step_id
        ]
        return [row for row, _ in chosen], [result for _, result in chosen]

    def tell(self, plan: StepPlan, stats: StepStats) -> None:
        """Add K, the reason for it, the gain and the drafter's health to a step's statistics."""
        if any(not row.is_prefill for row in plan.rows):
            stats.current_k, stats.k_reason = plan.num_drafts, plan.draft_reason
        self._tell_gain(stats)
        self.tell_health(stats)

    def _tell_gain(self, stats: StepStats) -> None:
        """Add how long the step took, and how long its tokens would have taken without drafts."""
        if self._timed is None:
            return
        num_reqs, seconds, has_drafts = self._timed
        self._timed = None
        stats.decode_seconds = stats.seconds_without_drafts = seconds
        if has_drafts:
            plain = self.controller.costs.seconds(num_reqs, 0)  # yields a token for each request
            stats.seconds_without_drafts = plain * stats.num_generated_tokens / num_reqs

    def tell_health(self, stats: StepStats) -> None:
        """Add the drafter's health, and the troubles since the last call."""
        watchdog = self.controller.watchdog
        if watchdog is not None:
            stats.drafter_healthy = watchdog.is_healthy
            for trouble, count in watchdog.num_troubles.items():
                if new := count - self._troubles.get(trouble, 0):
                    stats.drafter_troubles[trouble] = new
            self._troubles = dict(watchdog.num_troubles)

    def new_drafter(self) -> None:
        """Forget all acceptance: the drafter's weights change before the next step."""
        self.controller.new_drafter()

    def rest(self) -> None:
        """The engine is idle: the time until the next step lands is not a step's duration."""
        self._landed_at = None

    def _enter(self, new: NewRequest, step_id: int) -> None:
        sampling = new.sampling
        cap = sampling.speculative_max_tokens if sampling.speculative_enabled else 0
        self.controller.restart(new.slot, cap, greedy=sampling.temperature == 0)
        self._deferred[new.slot], self._since[new.slot] = 0, step_id
        self._entered_at = step_id

    def _may_defer(self, plan: StepPlan) -> bool:
        """Whether the drafter may skip this step: nothing is drafted after it, and every row yields
        exactly one token."""
        if plan.num_drafts or not self._defers:
            return False
        if not self._max_deferred:
            return True
        deferred, most = self._deferred, self._max_deferred
        return all([row.num_tokens == 1 and deferred[row.slot] < most for row in plan.rows])

    def _watch(
        self,
        results: Sequence[RowResult],
        accepted: Sequence[int],
        texts: Callable[[], list[Sequence[int]]],
    ) -> None:
        watchdog = self.controller.watchdog
        if watchdog is None:
            return
        if num_drafted := sum([result.num_draft_tokens for result in results]):
            new_texts = texts() if watchdog.wants_texts else ()
            watchdog.observe(num_drafted, sum(accepted), new_texts)

    def _refine(self, plan: StepPlan, num_drafts: int, seconds: float) -> None:
        """Learn the duration of a step of decode rows: the time since the last step landed."""
        num_reqs = len(plan.rows)
        if self.controller.costs.is_known:
            self._timed = num_reqs, seconds, bool(num_drafts or plan.num_drafts)
        scheduled = [row.num_draft_tokens for row in plan.rows]
        steady = plan.num_drafts if plan.num_drafts == max(scheduled) else None
        self.controller.costs.refine(num_reqs, num_drafts / num_reqs, seconds, steady)

    def _learn_prompts(self, plan: StepPlan, num_drafts: int, seconds: float) -> None:
        num_rows = _prompt_rows(plan.rows)
        num_reqs = sum([not _is_prompt(row) for row in plan.rows])
        if num_reqs and num_rows:
            costs = self.controller.costs
            costs.learn_prompts(num_reqs, num_drafts / num_reqs, num_rows, seconds)

    def _log(self, plan: StepPlan, num_reqs: int) -> None:
        """Log a change of K, at most once in `_LOG_SECONDS`."""
        assert plan.num_drafts is not None
        if plan.num_drafts == self._logged or plan.draft_reason not in _LASTING_REASONS:
            return
        if (now := self._clock()) < self._log_at:
            return
        self._logged, self._log_at = plan.num_drafts, now + _LOG_SECONDS
        logger.debug(
            "speculation: K = %d with %d requests (%s)",
            plan.num_drafts, num_reqs, plan.draft_reason,
        )  # fmt: skip


def _is_prompt(row: ScheduledRow) -> bool:
    """True for a chunk of a prompt, the last one included."""
    return row.is_prefill or row.num_tokens > row.num_draft_tokens + 1


def _prompt_rows(rows: Sequence[ScheduledRow]) -> int:
    """The tokens of prompts in a step, whose rows are in batch order: those of prompts are last."""
    return sum([row.num_tokens for row in takewhile(_is_prompt, reversed(rows))])


class DraftFacts(Protocol):
    """The facts about a model runner that the planner needs. They are read once."""

    @property
    def device(self) -> str: ...

    @property
    def needs(self) -> SpeculatorNeeds: ...

    @property
    def limits(self) -> StepLimits: ...

    # (N, K) -> seconds of a step, as measured at start-up; may be empty
    @property
    def step_seconds(self) -> Mapping[tuple[int, int], float]: ...


def plan_drafts(facts: DraftFacts, config: Config) -> DraftPlanner | None:
    """The planner for a runner as configured; None without a drafter."""
    needs, spec = facts.needs, config.speculative
    most, seats = needs.num_speculative_tokens, facts.limits.max_num_seqs
    if not most:
        return None
    counts = [most]
    if spec.num_speculative_tokens is None:
        counts = [count for count in spec.draft_counts if count < most] + counts
    watched = spec.watchdog and needs.watched and spec.synthetic_acceptance_rates is None
    trims = facts.device.startswith("cpu")
    alone = config.parallel.data_parallel_size == 1
    controller = DraftController(
        counts,
        seats,
        # With several ranks a step's duration also depends on the others, so it corrects no guess.
        StepCosts(facts.step_seconds, most, not (trims and alone), alone),
        needs.per_request_drafts,
        Watchdog(spec.method) if watched else None,
    )
    learns = len(counts) > 1
    return DraftPlanner(
        controller, seats, needs.max_deferred_tokens, trims, learns=learns, may_defer=alone
    )
