"""The drafts themselves: a faulty drafter changes no text, so only its drafts show the fault.

Three comparisons need no other implementation of the drafter. A proposal that was made step by step
must equal that of a fresh prefill of the same text, since neither a stale nor a missing KV row can
be in the latter. A draft must fit the text at its own position better than at a neighbour's. And a
draft model's second draft must be its first draft one token later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...runner.messages import SamplingParams
from ..drafters.acceptance import Submits, Tally
from .plan import Subject
from .replies import Reply, generate
from .report import Report, percent

GROUP = "Drafts"
_ALIGNMENT = 1e-5  # chance that drafts unrelated to the text seem shifted by one of the shifts
# A draft that is stored one position late is always the token before it. A drafter that is poor at
# second drafts may repeat its first one often.
_MISPLACED = 0.95
_MOST_FRESH = 96  # proposals that are made again
_SHIFTS = (-2, -1, 1, 2)
# Share of proposals that rounding may change: a near-tie of the drafter decides differently.
_ROUNDED = {"float32": 0.02}
_ROUNDED_16_BITS = 0.1

Proposals = Mapping[tuple[int, ...], Sequence[int]]  # known tokens -> drafts


def common_differences(ours: Proposals, theirs: Proposals) -> tuple[int, int, list[int]]:
    """Compare the proposals that follow the same text, as far as both go.

    Returns how many there are, how many differ, and the draft position of each first difference."""
    shared = [key for key in ours if key in theirs and ours[key] and theirs[key]]
    at = []
    for key in shared:
        pairs = zip(ours[key], theirs[key], strict=False)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            at.append(first)
    return len(shared), len(at), at


def judge_proposals(
    name: str, ours: Proposals, theirs: Proposals, dtype: str, report: Report, words: str
) -> None:
    """Add the verdict on two sets of proposals that should be equal."""
    shared, differing, at = common_differences(ours, theirs)
    if not shared:
        report.skip(GROUP, name, "no proposal of both follows the same text")
        return
    most = 1 + _ROUNDED.get(dtype, _ROUNDED_16_BITS) * shared
    text = f"{shared - differing} of {shared} proposals are equal"
    if differing:
        text += f"; the others differ first at draft {min(at) + 1}"
    if differing > most:
        text += f", more than rounding explains: {words}"
    report.add(
        GROUP, name, differing <= most, text, proposals=shared, different=differing, first=at
    )


async def check_fresh(
    engine: Submits, replies: Sequence[Reply], subject: Subject, report: Report
) -> None:
    """Make proposals of the replies again, each by a prefill of its text, and compare."""
    made = [
        (reply, proposal)
        for reply in replies
        for proposal in reply.proposals
        if 1 <= proposal.start <= len(reply.token_ids) and proposal.drafts
    ]
    made = made[:: max(1, math.ceil(len(made) / _MOST_FRESH))]
    width = max((len(proposal.drafts) for _, proposal in made), default=0)
    # One token more than the drafts, or the end of the reply would cut them.
    sampling = SamplingParams(0, width + 2, temperature=0.0)
    texts = [[*reply.prompt, *reply.token_ids[: proposal.start - 1]] for reply, proposal in made]
    fresh = await generate(engine, texts, sampling, drafts=True, own_salts=True)
    ours = {
        (*reply.prompt, *reply.token_ids[: proposal.start]): proposal.drafts
        for reply, proposal in made
    }
    theirs: dict[tuple[int, ...], list[int]] = {}
    for reply in fresh:
        if reply.proposals and reply.proposals[0].start == 1:
            theirs[(*reply.prompt, *reply.token_ids[:1])] = reply.proposals[0].drafts
    judge_proposals(
        "made step by step, or afresh", ours, theirs, subject.dtype, report,
        "the drafter's KV or hidden states of earlier steps are stale, missing or misplaced",
    )  # fmt: skip


async def check_chain(
    engine: Submits, replies: Sequence[Reply], exact: bool, report: Report
) -> None:
    """After an accepted first draft, the second must be the first one of the longer text.

    `exact`: the drafter is a model of its own. A head reads its own hidden state in place of the
    target's for a second draft, so there the share of equal drafts is only reported.
    """
    name = "second drafts"
    made = [
        (reply, proposal)
        for reply in replies
        for proposal in reply.proposals
        if len(proposal.drafts) > 1 and proposal.num_emitted > 1
    ]
    made = made[:: max(1, math.ceil(len(made) / _MOST_FRESH))]
    texts = [[*reply.prompt, *reply.token_ids[: proposal.start]] for reply, proposal in made]
    sampling = SamplingParams(0, 4, temperature=0.0)
    longer = await generate(engine, texts, sampling, drafts=True, own_salts=True)
    equal = [
        proposal.drafts[1] == after.proposals[0].drafts[0]
        for (_, proposal), after in zip(made, longer, strict=True)
        if after.token_ids[0] == proposal.drafts[0]
        and after.proposals
        and after.proposals[0].start == 1
    ]
    if not equal:
        report.skip(GROUP, name, "no first draft was accepted with another one after it")
        return
    same, count = sum(equal), len(equal)
    text = f"{same} of {count} equal the first draft of the text that is longer by one draft"
    if not exact:
        report.note(GROUP, name, text, equal=same, count=count)
        return
    ok = count - same <= 1 + 0.1 * count
    if not ok:
        text += ": the drafter is fed another token, position or KV than its own last draft"
    report.add(GROUP, name, ok, text, equal=same, count=count)


def check_alignment(replies: Sequence[Reply], report: Report) -> None:
    """Each draft must fit the text at its own position, not at a neighbouring one."""
    faults: list[str] = []
    repeats: list[str] = []
    drafts = 0
    for position in range(max((len(p.drafts) for r in replies for p in r.proposals), default=0)):
        for shift in _SHIFTS:
            own = other = 0
            for reply in replies:
                for proposal in reply.proposals:
                    at = proposal.start + position
                    if position >= len(proposal.drafts) or at + shift < 0:
                        continue
                    if max(at, at + shift) >= len(reply.token_ids):
                        continue
                    draft, ids = proposal.drafts[position], reply.token_ids
                    drafts += shift == 1
                    own += draft == ids[at] != ids[at + shift]
                    other += draft == ids[at + shift] != ids[at]
            if other > own and _binomial_tail(other, own + other) < _ALIGNMENT:
                share = _repeated(replies, position)
                if shift == -1 and share < _MISPLACED:
                    repeats.append(
                        f"draft {position + 1} repeats the token before it in {percent(share)} of "
                        "the proposals, as one that the drafter was hardly trained for"
                    )
                    continue
                side = "before" if shift < 0 else "after"
                faults.append(
                    f"draft {position + 1} is {other} times the token {abs(shift)} {side} its "
                    f"place and {own} times the one at its place"
                )
    if not drafts:
        report.skip(GROUP, "positions", "there were no drafts")
        return
    if repeats and not faults:
        report.note(GROUP, "positions", "; ".join(repeats))
        return
    text = "; ".join(faults) or f"{drafts} drafts fit the text best at their own position"
    report.add(GROUP, "positions", not faults, text)


def _repeated(replies: Sequence[Reply], position: int) -> float:
    """The share of drafts at a position that are the token before them: all, if misplaced."""
    same = [
        draft == (proposal.drafts[position - 1] if position else reply.token_ids[before])
        for reply in replies
        for proposal in reply.proposals
        if position < len(proposal.drafts) and (before := proposal.start - 1) >= 0
        for draft in (proposal.drafts[position],)
    ]
    return sum(same) / len(same) if same else 1.0


def _binomial_tail(hits: int, count: int) -> float:
    """P(X >= hits) for `count` fair coins."""
    return math.fsum(math.comb(count, k) for k in range(hits, count + 1)) / 2.0**count


def tally(replies: Sequence[Reply]) -> Tally:
    found = Tally()
    for reply in replies:
        found.num_tokens += len(reply.token_ids)
        for proposal in reply.proposals:
            if proposal.start + proposal.num_emitted >= len(reply.token_ids):
                continue  # the reply's end cut what was accepted
            found.num_verify_steps += 1
            for counts in (found.drafted, found.accepted):
                counts.extend([0] * (len(proposal.drafts) - len(counts)))
            for position in range(len(proposal.drafts)):
                found.drafted[position] += 1
                found.accepted[position] += position < proposal.num_emitted - 1
    return found


def report_acceptance(name: str, replies: Sequence[Reply], report: Report) -> Tally:
    """Add the acceptance of some replies by position."""
    found = tally(replies)
    if not found.num_verify_steps:
        report.note(GROUP, f"acceptance, {name}", "no draft was made")
        return found
    shares = " ".join(percent(share) for share in found.acceptance)
    text = f"{found.mean_length:.2f} tokens a step; by position {shares}"
    report.note(GROUP, f"acceptance, {name}", text, **found.as_dict())
    return found


def report_speed(on: Sequence[Reply], off: Sequence[Reply], report: Report) -> None:
    """Add the speed-up of single requests, with its spread over the prompts."""
    ratios = sorted(
        (b.seconds / len(b.token_ids)) / (a.seconds / len(a.token_ids))
        for a, b in zip(on, off, strict=True)
        if a.token_ids and b.token_ids and a.seconds
    )
    if not ratios:
        return
    middle, low, high = (
        ratios[min(len(ratios) - 1, int(len(ratios) * q))] for q in (0.5, 0.1, 0.9)
    )
    report.note(
        GROUP, "speed-up, one at a time",
        f"{middle:.2f} times as fast (8 of 10 prompts: {low:.2f} to {high:.2f}), with a fixed K; "
        "`serve` chooses K for every step",
        ratios=[round(ratio, 4) for ratio in ratios],
    )  # fmt: skip
