"""OpenAI's usage object from a request's counts."""

from __future__ import annotations

from .generation import TokenCounts
from .openai_types.replies import CompletionTokensDetails, PromptTokensDetails, Usage


def usage(counts: TokenCounts, reasoning_tokens: int = 0) -> Usage:
    """All choices together; the prompt counts once."""
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
