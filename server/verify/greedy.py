"""Greedy replies with drafts against those without: identical, different in a near-tie, or wrong.

Under `--batch-invariant` there are no near-ties: replies that differ are wrong.

Every token of every reply is judged, also after a first difference: a prefill without drafts says
how far below the likeliest token it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...runner.messages import SamplingParams
from ..drafters.acceptance import Submits
from .replies import Reply, Scores, generate, score
from .report import Report, nats
from .rounding import Rounding

GROUP = "Greedy text"


@dataclass(frozen=True)
class Difference:
    """Where a reply with drafts leaves that without them."""

    prompt: int
    position: int  # reply tokens before it
    gap: float | None  # nats by which the token is less likely than the likeliest; None: it ends

    @property
    def words(self) -> str:
        if self.gap is None:
            return f"ends after {self.position} tokens, and the other reply does not"
        return f"has a token {self.position + 1} that is {nats(self.gap)} below the likeliest"


@dataclass(frozen=True)
class Greedy:
    """The greedy replies of both sides."""

    on: list[Reply]
    off: list[Reply]
    scores: list[Scores]  # of `on`


def first_difference(on: Sequence[object], off: Sequence[object]) -> int | None:
    """The first position at which two replies differ; None if they are equal."""
    for position, (a, b) in enumerate(zip(on, off, strict=False)):
        if a != b:
            return position
    return None if len(on) == len(off) else min(len(on), len(off))


async def check_greedy(
    engine: Submits,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop: Sequence[int],
    rounding: Rounding,
    report: Report,
    tick: Callable[[], object] = lambda: None,
) -> Greedy:
    """Compare both sides one by one and all at once; returns the replies one by one."""
    sampling = SamplingParams(0, max_tokens, temperature=0.0, stop_token_ids=list(stop))
    alone = None
    for name, concurrency in (("one request at a time", 1), ("all requests at once", 0)):
        sides = [
            await generate(
                engine, prompts, sampling, drafts=drafts, concurrency=concurrency, tick=tick,
                salt=f"greedy {name} {drafts}",
            )
            for drafts in (True, False)
        ]  # fmt: skip
        scores = await score(engine, sides[0], 1)
        found = Greedy(sides[0], sides[1], scores)
        if alone is not None and rounding.exact:
            judge_company(alone.on, found.on, report)
        alone = alone or found
        judge(name, found, rounding, report)
    assert alone is not None
    return alone


def judge_company(alone: Sequence[Reply], together: Sequence[Reply], report: Report) -> None:
    """Under `--batch-invariant`, replies must be equal one at a time and all at once."""
    equal = sum(a.token_ids == b.token_ids for a, b in zip(alone, together, strict=True))
    text = f"{equal} of {len(alone)} replies are the same one at a time and all at once"
    report.add(GROUP, "in any company", equal == len(alone), text, equal=equal)


def judge(name: str, greedy: Greedy, rounding: Rounding, report: Report) -> None:
    errors = [r.error for r in (*greedy.on, *greedy.off) if r.error]
    if errors:
        report.add(GROUP, name, False, f"{len(errors)} requests failed: {errors[0]}")
        return
    ties: list[Difference] = []
    wrong: list[Difference] = []
    for index, (on, off, scores) in enumerate(
        zip(greedy.on, greedy.off, greedy.scores, strict=True)
    ):
        gaps = [row.top_logprobs[0] - row.logprob for row in scores]
        at = first_difference(on.token_ids, off.token_ids)
        if at is not None:
            # A reply that ends early has no token at the difference: its end was the difference.
            gap = gaps[at] if at < len(gaps) else None
            is_tie = gap is not None and gap <= rounding.near_tie and not rounding.exact
            (ties if is_tie else wrong).append(Difference(index, at, gap))
        worst = max(range(len(gaps)), key=gaps.__getitem__, default=None)
        if worst is not None and gaps[worst] > rounding.near_tie:
            if not wrong or wrong[-1].prompt != index:
                wrong.append(Difference(index, worst, gaps[worst]))
    num_tokens = sum(len(reply.token_ids) for reply in greedy.on)
    equal = len(greedy.on) - len({d.prompt for d in (*ties, *wrong)})
    text = f"{equal} of {len(greedy.on)} replies are identical ({num_tokens} tokens)"
    if ties:
        gap = max(tie.gap or 0.0 for tie in ties)
        text += f", {len(ties)} differ first in a near-tie of at most {nats(gap)}"
    if wrong:
        first = wrong[0]
        text += f", {len(wrong)} are wrong: that to prompt {first.prompt + 1} {first.words}"
        promise = "--batch-invariant promises equal text"
        text += (
            f" ({promise if rounding.exact else f'rounding explains {nats(rounding.near_tie)}'})"
        )
    report.add(
        GROUP, name, not wrong, text, replies=len(greedy.on), identical=equal,
        near_ties=[vars(d) for d in ties], different=[vars(d) for d in wrong],
    )  # fmt: skip
