"""Tests a back end's claim (`AttentionBuilder.supports`), and lowers it if graphs differ.

A claim that is too high corrupts output silently (vllm#45425), so it is tested, not trusted. This
file knows no back end by name and no device: it takes a function that measures one case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...configs.graphs import AttentionCGSupport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimCase:
    """A kind of batch: all rows of that query length, or for None any mix of lengths."""

    uniform_token_count: int | None

    def needs(self) -> AttentionCGSupport:
        """The lowest claim with which this case runs in a FULL graph."""
        if self.uniform_token_count is None:
            return AttentionCGSupport.ALWAYS
        if self.uniform_token_count == 1:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def __str__(self) -> str:
        length = self.uniform_token_count
        return "a mixed batch" if length is None else f"query length {length}"


@dataclass(frozen=True)
class LoweredClaim:
    """A claim that failed its test; counted by the metric `attention_claims_lowered_total`."""

    backend: str
    claimed: AttentionCGSupport
    verified: AttentionCGSupport
    case: ClaimCase
    error: float  # relative, graph against eager

    def __str__(self) -> str:
        return (
            f"{self.backend} attention claims {self.claimed.name}, but for {self.case} a graph "
            f"differs from eager by {self.error:.1e}; using {self.verified.name} instead"
        )


def verify_claim(
    backend: str,
    claimed: AttentionCGSupport,
    cases: Iterable[ClaimCase],
    measure: Callable[[ClaimCase], float],  # relative error of graph against eager
    tolerance: float,
    on_lowered: Callable[[LoweredClaim], None] | None = None,
) -> AttentionCGSupport:
    """Measure the cases and return the highest claim up to `claimed` that they support.

    A lowered claim is logged once and passed to `on_lowered`. Cases that the claim does not cover
    are not measured. An error that is NaN counts as a failure.
    """
    verified, failure = claimed, None
    for case in sorted(cases, key=lambda case: -case.needs()):
        if case.needs() > verified:
            continue
        error = measure(case)
        if not error <= tolerance:
            verified, failure = AttentionCGSupport(case.needs() - 1), (case, error)
    if failure is not None:
        lowered = LoweredClaim(backend, claimed, verified, *failure)
        logger.warning("%s", lowered)
        if on_lowered is not None:
            on_lowered(lowered)
    return verified
