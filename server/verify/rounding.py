"""Measures how far rounding alone moves log probabilities, between two ways without drafts.

A decode step and a prefill compute the same log probabilities by other kernels and in other
orders. Verification of drafts is a third way; it is allowed as much as the two differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from ...runner.messages import SamplingParams
from ..drafters.acceptance import Submits
from .replies import Reply, Scores, generate, score
from .report import Report, nats

GROUP = "Log probabilities"
_LEAST = 1e-4  # nats; float32 differs by about 1e-6
_MOST = {"float32": 0.02}  # nats; a larger difference is not rounding
_MOST_16_BITS = 0.5
_NEAR = -5.0  # log probabilities below it matter little, and round more


@dataclass(frozen=True)
class Rounding:
    """What rounding does here, in nats."""

    near_tie: float  # a gap that it explains
    mean: float  # mean deviation, allowed as a deviation of every probability of a test
    exact: bool = False  # `--batch-invariant` promises that all deviations are 0


def differences(
    replies: Sequence[Reply], scores: Sequence[Scores], exact: bool = False
) -> list[float]:
    """The deviations of reported log probabilities from those of a prefill.

    Those of unlikely tokens are left out, unless `exact` promises that all are 0.
    """
    return [
        abs(row.logprob - reference.logprob)
        for reply, found in zip(replies, scores, strict=True)
        for row, reference in zip(reply.logprobs, found, strict=False)
        if exact or reference.logprob > _NEAR
    ]


async def measure_rounding(
    engine: Submits,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    dtype: str,
    report: Report,
    exact: bool = False,
) -> Rounding:
    """Measure it, and add a check that it is no more than rounding; `exact`: that it is 0."""
    sampling = SamplingParams(0, max_tokens, logprobs=0)
    replies = await generate(engine, prompts, sampling, drafts=False, salt="rounding")
    found = differences(replies, await score(engine, replies, 1), exact)
    most = 0.0 if exact else _MOST.get(dtype, _MOST_16_BITS)
    if not found:
        say_none_was_compared(report, "decode against prefill", replies)
        return Rounding(most, _LEAST, exact)
    largest, mean = max(found), sum(found) / len(found)
    report.add(
        GROUP, "decode against prefill", largest <= most,
        f"without drafts, {len(found)} log probabilities differ by {nats(mean)} on average and by "
        f"{nats(largest)} at most, which is how exact this model is here"
        + ("" if largest <= most else f"; {_allowed(most)}"),
        mean=mean, largest=largest,
    )  # fmt: skip
    if exact:
        return Rounding(_LEAST, _LEAST / 10, exact)
    near_tie = min(most, max(_LEAST, 4 * largest))
    return Rounding(near_tie, min(most / 4, max(_LEAST / 10, mean)))


def say_none_was_compared(report: Report, name: str, replies: Sequence[Reply]) -> None:
    """Add a check that compared nothing: a failure if log probabilities are missing."""
    if not any(reply.logprobs for reply in replies):
        report.add(GROUP, name, False, "no log probabilities were reported")
        return
    report.skip(
        GROUP, name,
        f"each token of the replies has a probability below {exp(_NEAR):.1%}, and those of "
        "unlikely tokens are not compared, because they round more",
    )  # fmt: skip


def _allowed(most: float) -> str:
    return f"rounding explains {nats(most)}" if most else "--batch-invariant promises 0"


async def check_logprobs(
    engine: Submits,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rounding: Rounding,
    report: Report,
) -> None:
    """Compare log probabilities reported with drafts to those of a prefill, with all options set.

    They are the model's own, before any option: penalties, bias and temperature must not show.
    """
    sampling = SamplingParams(
        0, max_tokens, logprobs=1, temperature=0.7, presence_penalty=0.8, frequency_penalty=0.5,
        repetition_penalty=1.3, min_p=0.02,
    )  # fmt: skip
    replies = await generate(engine, prompts, sampling, drafts=True)
    scores = await score(engine, replies, 1)
    found = differences(replies, scores, rounding.exact)
    if not found:
        say_none_was_compared(report, "with drafts", replies)
        return
    largest = max(found)
    text = f"{len(found)} log probabilities deviate from a prefill's by {nats(largest)} at most"
    most = 0.0 if rounding.exact else rounding.near_tie
    if largest > most:
        text += f", and {_allowed(most)}"
    ids = sum(
        row.token_id != token
        for reply in replies
        for row, token in zip(reply.logprobs, reply.token_ids, strict=False)
    )
    missing = sum(len(reply.token_ids) != len(reply.logprobs) for reply in replies)
    if ids or missing:
        text += f"; {ids} belong to another token, and {missing} replies lack some"
    ok = largest <= most and not ids and not missing
    report.add(GROUP, "with drafts", ok, text, largest=largest, count=len(found))
