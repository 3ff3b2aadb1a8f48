"""Builds OpenAI's usage object and the speculation metrics of a reply."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from ..openai_types.common import Speculative
from ..openai_types.replies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    ReplyMetrics,
    SpeculativeMetrics,
    Usage,
)
from ..text.choice_text import ChoiceText
from .generation import TokenCounts
from .services import Services


def usage(counts: TokenCounts, reasoning_tokens: int = 0) -> Usage:
    """The usage object of a request: all choices together, each prompt counted once."""
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=PromptTokensDetails(counts.cached),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=reasoning_tokens,
            accepted_prediction_tokens=counts.accepted_prediction,
            rejected_prediction_tokens=counts.rejected_prediction,
        ),
    )


def reply_metrics(
    services: Services, requested: Speculative | None, choices: Sequence[ChoiceText]
) -> ReplyMetrics | UnsetType:
    """The speculation metrics of a reply; UNSET if not requested or without a drafter.

    `requested` overrides the server's --per-request-spec-decode-metrics.
    """
    level = services.config.server.per_request_spec_decode_metrics
    if requested is not None and requested.metrics is not None:
        level = requested.metrics
    most = services.engine.ready.num_speculative_tokens
    if level == "none" or not most:
        return UNSET
    steps = [step for choice in choices for step in choice.spec_steps]
    return ReplyMetrics(speculative_metrics(steps, most, level == "detailed"))


def speculative_metrics(
    steps: Sequence[tuple[int, int]], most: int, detailed: bool = False
) -> SpeculativeMetrics:
    """The metrics of the (accepted, drafted) pairs of all verification steps.

    `most` is the maximum draft length K. `detailed` adds the pairs themselves.
    """
    histogram = [0] * (most + 1)
    by_length: dict[int, list[int]] = {}
    for accepted, drafted in steps:
        histogram[accepted] += 1
        by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1
    num_accepted, num_drafted = (sum(step[column] for step in steps) for column in (0, 1))
    metrics = SpeculativeMetrics(
        mean_acceptance_length=1 + num_accepted / max(1, len(steps)),
        draft_acceptance_rate=num_accepted / max(1, num_drafted),
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length={str(k): by_length[k] for k in sorted(by_length)},
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=most,
    )
    if detailed:
        metrics.per_step_accepted = [accepted for accepted, _ in steps]
        metrics.per_step_drafted = [drafted for _, drafted in steps]
    return metrics
