"""Decides which of two draft heads to keep, from their acceptance on the same prompts.

It knows nothing of engines. Greedy replies are the same with either head, but other requests
influence how many drafts a step has, and so where the next step starts. Only steps that start at
the same token of a reply are compared, over the drafts that both have, so that a head always
equals itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...runner.messages import RequestOutput
from .acceptance import Tally

# Tolerance in standard errors. An equally good head exceeds it in one trial of forty.
_ERRORS = 2.0
# Upper bound of the tolerance, as a share of the running head's tokens per step.
_MOST = 0.05


@dataclass
class Reply:
    """One reply and its verify steps.

    `steps` maps the index of a step's first token to its numbers of drafts and accepted drafts."""

    token_ids: list[int] = field(default_factory=list)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> None:
        if output.num_draft_tokens:
            counts = (output.num_draft_tokens, output.num_accepted_tokens)
            self.steps[len(self.token_ids)] = counts
        self.token_ids += output.token_ids

    def agrees_to(self, other: Reply) -> int:
        """The number of tokens before the first difference, which a near-tie can cause."""
        both = enumerate(zip(self.token_ids, other.token_ids, strict=False))
        ends = min(len(self.token_ids), len(other.token_ids))
        return next((at for at, (ours, theirs) in both if ours != theirs), ends)


@dataclass
class Measurement:
    """The replies to the probe's prompts with one head."""

    tally: Tally = field(default_factory=Tally)
    replies: dict[int, Reply] = field(default_factory=dict)  # index of the prompt -> reply

    def add(self, prompt: int, output: RequestOutput) -> None:
        self.tally.add(output)
        self.replies.setdefault(prompt, Reply()).add(output)


@dataclass(frozen=True)
class Comparison:
    """Tokens per verify step of both heads, over the steps that both have."""

    num_steps: int
    old: float
    new: float
    error: float  # standard error of the difference; infinite if there is only one reply

    @property
    def tolerance(self) -> float:
        """The difference, in tokens per step, up to which the new head is not considered worse."""
        return min(_ERRORS * self.error, _MOST * self.old)

    @property
    def is_worse(self) -> bool:
        return self.new < self.old - self.tolerance


def judge(before: Measurement, after: Measurement, force: bool) -> tuple[bool, str]:
    """Decide whether the new head (`after`) replaces the running one (`before`).

    Returns whether to keep the new head, and the reason. With `force` it is always kept."""
    if not before.tally.num_verify_steps:  # the running head's acceptance is unknown
        none = not after.tally.num_verify_steps
        who = "neither drafter" if none else "the running drafter"
        return force, f"{who} made {'any' if none else 'no'} drafts on the probe"
    found = compare(before, after)
    if not found.num_steps:
        return force, "the two drafters made no drafts at the same positions of the probe"
    figures = (
        f"{found.new:.3f} tokens per verify step on the probe, the running drafter {found.old:.3f}"
    )
    if found.new < found.old:
        figures += f"; a difference of up to {found.tolerance:.3f} may be noise"
    if not found.is_worse:
        return True, f"not worse: {figures}"
    return force, f"{'worse, but forced' if force else 'worse'}: {figures}"


def compare(before: Measurement, after: Measurement) -> Comparison:
    """Compare the heads over the steps that both have.

    The standard error is that of a mean over clusters, one per reply, because the steps of a reply
    are correlated."""
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
    """(old, new) accepted drafts of the steps that start at the same token of a reply.

    If the two steps have different numbers of drafts, only the smaller number counts."""
    same = old.agrees_to(new)
    found = []
    for at, (drafts, accepted) in old.steps.items():
        if at <= same and at in new.steps:
            other_drafts, other_accepted = new.steps[at]
            most = min(drafts, other_drafts)
            found.append((min(accepted, most), min(other_accepted, most)))
    return found
