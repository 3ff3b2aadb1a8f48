"""Decides between two draft heads by what became of their drafts in the same texts.

Knows no engine. Greedy texts are the same whoever drafts, but what else runs decides how many
drafts a step has, and so where the next one begins. So steps are compared that began at the same
token of a text, over the drafts that both have: there a head is always equal to itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...runner.messages import RequestOutput
from .acceptance import Tally

# Of a head that is as good, one trial in forty shows more than two standard errors.
_ERRORS = 2.0
# No noise excuses more than this share of the tokens that the running head brings in a step.
_MOST = 0.05


@dataclass
class Reply:
    """One text, and the steps that verified drafts in it."""

    token_ids: list[int] = field(default_factory=list)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)  # first token -> made, accepted

    def add(self, output: RequestOutput) -> None:
        """Take one step's output."""
        if output.num_draft_tokens:
            counts = (output.num_draft_tokens, output.num_accepted_tokens)
            self.steps[len(self.token_ids)] = counts
        self.token_ids += output.token_ids

    def agrees_to(self, other: Reply) -> int:
        """The number of tokens before the first that differs, as a near-tie may."""
        both = enumerate(zip(self.token_ids, other.token_ids, strict=False))
        ends = min(len(self.token_ids), len(other.token_ids))
        return next((at for at, (ours, theirs) in both if ours != theirs), ends)


@dataclass
class Measurement:
    """What a probe showed of one head."""

    tally: Tally = field(default_factory=Tally)
    replies: dict[int, Reply] = field(default_factory=dict)  # by prompt

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Take one step's output of one reply."""
        self.tally.add(output)
        self.replies.setdefault(prompt, Reply()).add(output)


@dataclass(frozen=True)
class Comparison:
    """Tokens that a step brings with either head, where both are seen."""

    num_steps: int
    old: float
    new: float
    error: float  # standard error of the difference; infinite if there is one text alone

    @property
    def tolerance(self) -> float:
        """By how much the new head may look worse and still be taken for as good."""
        return min(_ERRORS * self.error, _MOST * self.old)

    @property
    def is_worse(self) -> bool:
        """Worse than chance explains."""
        return self.new < self.old - self.tolerance


def judge(before: Measurement, after: Measurement, force: bool) -> tuple[bool, str]:
    """(keep the new head?, why)."""
    if not before.tally.num_verify_steps:  # nothing tells what the running one is worth
        none = not after.tally.num_verify_steps
        who = "neither drafter made a" if none else "the running drafter made no"
        return force, f"{who} draft on the probe"
    found = compare(before, after)
    if not found.num_steps:
        return force, "the two drafters made no drafts at the same place of the probe"
    told = f"{found.new:.3f} tokens a step on the probe, the running one {found.old:.3f}"
    if found.new < found.old:
        told += f"; up to {found.tolerance:.3f} less may be chance"
    if not found.is_worse:
        return True, f"not worse: {told}"
    return force, f"{'worse, but forced' if force else 'worse'}: {told}"


def compare(before: Measurement, after: Measurement) -> Comparison:
    """The heads in the steps that both have. The error is that of a mean of pairs that come in
    groups, the texts: steps of one text are good or bad together."""
    groups = [
        _pairs(reply, after.replies[prompt])
        for prompt, reply in before.replies.items()
        if prompt in after.replies
    ]
    groups = [pairs for pairs in groups if pairs]
    count = sum(len(pairs) for pairs in groups)
    if not count:
        return Comparison(0, 1.0, 1.0, math.inf)
    old, new = (1 + sum(pair[i] for pairs in groups for pair in pairs) / count for i in (0, 1))
    error = math.inf
    if len(groups) > 1:
        spread = sum(sum(b - a - (new - old) for a, b in pairs) ** 2 for pairs in groups)
        error = math.sqrt(spread * len(groups) / (len(groups) - 1)) / count
    return Comparison(count, old, new, error)


def _pairs(old: Reply, new: Reply) -> list[tuple[int, int]]:
    """Accepted drafts of the steps that began at the same token, of as many as both had."""
    same = old.agrees_to(new)
    found = []
    for at, (drafts, accepted) in old.steps.items():
        if at <= same and at in new.steps:
            other_drafts, other_accepted = new.steps[at]
            most = min(drafts, other_drafts)
            found.append((min(accepted, most), min(other_accepted, most)))
    return found
