"""Applies a row's result to its request: which tokens it keeps, whether it ends, what is counted.

Counting rule. A row that keeps t tokens counts as one verify row if it had real drafts, otherwise
as one plain row, and has t - 1 accepted drafts. If a stop falls within the accepted drafts, the
last kept token was a draft but counts as the row's own token, and the drafts after it do not count
as accepted. In every step, therefore, exactly: accepted + verify rows + plain rows = generated, and
sum(accepted_per_pos) = accepted <= drafted. "Drafted" counts every real draft that was verified,
kept or not, because verifying it had its cost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from ..grammars.grammar import GrammarMatcher, leaves_no_token
from ..messages import RequestOutput, StepStats, TokenLogprobs, pack_logprobs
from .plan import RowResult, ScheduledRow
from .request import Request

logger = logging.getLogger(__name__)

NAN_ERROR = "The model produced NaN for this request."
DEAD_END_ERROR = (
    "The request's options leave no token to choose after {} tokens: the grammar (as "
    "'response_format' or tools give one), 'allowed_token_ids', 'bad_words' and 'min_tokens' "
    "forbid every one."
)


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """How many of a row's tokens are kept, and whether and why the request ends with them."""

    num_kept: int
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    invalid_request: bool = False  # with `error`: the request is at fault


def fault(request: Request, result: RowResult) -> Verdict | None:
    """The verdict on a row that ends its request with an error; None if it has none."""
    if not result.has_nan and result.error is None:
        return None
    if result.error is not None:
        return Verdict(0, "error", error=result.error)
    output = request.token_ids[request.prompt_len :]
    for index, token_id in enumerate(result.token_ids):  # the first of them may be drafts
        lines = request.mask_lines
        line = None if lines is None else lines[min(index, len(lines) - 1)]
        if leaves_no_token(request.sampling, line, output):
            error = DEAD_END_ERROR.format(len(output))
            return Verdict(0, "error", error=error, invalid_request=True)
        output.append(token_id)
    return Verdict(0, "error", error=NAN_ERROR)


def refusal(request_id: str, error: str, invalid_request: bool) -> RequestOutput:
    """The output of a request that ends with an error outside a step."""
    output = RequestOutput(request_id, [], finish_reason="error", error=error)
    output.invalid_request = invalid_request
    return output


def append_tokens(request: Request, token_ids: list[int]) -> Verdict:
    """Append emitted tokens, up to the first that ends the request, and advance its grammar."""
    known, matcher = request.token_ids, request.matcher
    if (
        matcher is None
        and len(known) + len(token_ids) < request.max_total_len
        and request.stops.isdisjoint(token_ids)
    ):  # the usual case
        known += token_ids
        return Verdict(len(token_ids))
    for index, token_id in enumerate(token_ids):
        if matcher is not None and not accepts(matcher, token_id):
            error = f"Token {token_id} violates the request's grammar."
            return Verdict(index, "error", error=error)
        known.append(token_id)
        # The sampler masks stop tokens before min_tokens; if one slips through, ignore it.
        late = request.num_output_tokens > request.sampling.min_tokens
        is_stop = token_id in request.stops and late
        if is_stop:
            return Verdict(index + 1, "stop", stop_token_id=token_id)
        if matcher is not None and matcher.is_terminated:
            ending = None if matcher.ends_with_text else token_id
            return Verdict(index + 1, "stop", stop_token_id=ending)
        if len(known) >= request.max_total_len:
            return Verdict(index + 1, "length")
    return Verdict(len(token_ids))


def accepts(matcher: GrammarMatcher, token_id: int) -> bool:
    """Advance a grammar; False if it refuses the token.

    A fault in it is logged and is a refusal.
    """
    try:
        return matcher.accept(token_id)
    except Exception:
        logger.exception("a grammar failed")
        return False


def make_output(request: Request, result: RowResult, verdict: Verdict) -> RequestOutput:
    """Build the message to the server for a row's kept tokens."""
    kept, token_ids = verdict.num_kept, result.token_ids
    if kept != len(token_ids):
        token_ids = token_ids[:kept]
    output = RequestOutput(request.request_id, token_ids)
    if kept and result.num_draft_tokens:
        output.num_draft_tokens = result.num_draft_tokens
        output.num_accepted_tokens = kept - 1
    if verdict.finish_reason is not None:
        output.finish_reason = verdict.finish_reason
        output.stop_token_id = verdict.stop_token_id
        output.error = verdict.error
        output.invalid_request = verdict.invalid_request
    if result.draft_token_ids is not None:
        output.draft_token_ids = result.draft_token_ids
    if result.logprobs is not None:
        output.logprobs = [TokenLogprobs(*item) for item in result.logprobs[:kept]]
    if not request.has_emitted:
        request.has_emitted = True
        output.num_cached_tokens = request.num_cached_tokens or 0
        if request.sampling.prompt_logprobs is not None and verdict.error is None:
            output.prompt_logprobs = request.prompt_logprobs
            request.prompt_logprobs = []
    return output


def count_outputs(stats: StepStats, outputs: Iterable[RequestOutput]) -> None:
    """Add the kept tokens of a step's rows to its counters."""
    generated = drafts = drafted = accepted = plain = 0
    by_accepted = [0] * (len(stats.accepted_per_pos) + 1)  # number of rows by accepted drafts
    for output in outputs:
        if not output.token_ids:
            continue
        generated += len(output.token_ids)
        if output.num_draft_tokens == 0:
            plain += 1
            continue
        drafts += 1
        drafted += output.num_draft_tokens
        accepted += output.num_accepted_tokens
        by_accepted[output.num_accepted_tokens] += 1
    stats.num_generated_tokens += generated
    stats.num_plain_steps += plain
    stats.num_drafts += drafts
    stats.num_draft_tokens += drafted
    stats.num_accepted_tokens += accepted
    reached = 0  # rows that accepted the draft at `position`
    for position in reversed(range(len(stats.accepted_per_pos))):
        reached += by_accepted[position + 1]
        stats.accepted_per_pos[position] += reached


def take_prompt(request: Request, row: ScheduledRow, result: RowResult) -> int:
    """Keep a row's prompt log probabilities; return how many prompt tokens to count for it.

    Each position counts once, even if it is computed again after a preemption.
    """
    if result.prompt_logprobs and not result.has_nan and request.wants_prompt_logprobs:
        request.prompt_logprobs += pack_logprobs(
            [TokenLogprobs(*item) for item in result.prompt_logprobs]
        )
    start = max(request.num_counted_prompt_tokens, row.num_computed_tokens)
    end = min(row.num_computed_tokens + row.num_tokens, request.prompt_len)
    if end > start:
        request.num_counted_prompt_tokens = end
    return max(0, end - start)
