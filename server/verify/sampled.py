"""Sampled replies: does every token have the distribution that the model and the options define?

Two tests for each set of options. *Known probabilities*: a prefill without drafts yields the
probabilities at every position of the replies with drafts; how often the judged draft, the
likeliest token and an unlikely token were emitted must agree with them. *Two samples*: the first
tokens, with drafts and without.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...runner.messages import GrammarSpec, SamplingParams
from ..drafters.acceptance import Submits
from .plan import Plan, Subject
from .reference import Distribution, distribution
from .replies import Reply, Scores, generate, score
from .report import FALSE_ALARM, TOGETHER, Report, percent
from .rounding import Rounding
from .statistics import Bet, Comparison, compare

GROUP = "Sampled text"
EVENTS = ("the judged draft", "the likeliest token", "an unlikely token")
_LIKELY = 3  # tokens; all others are unlikely
_MAX_TOP = 64  # log probabilities asked for at each position
_SEEDS = 1 << 32  # seeds of an option, in two halves
_POSITIONS = 3  # the first tokens of replies, which two samples compare one by one


@dataclass(frozen=True)
class SampledOption:
    """A set of sampling options to check."""

    name: str
    sampling: SamplingParams
    has_reference: bool = True  # whether `reference.distribution` supports them


def sampled_options(
    likely: Sequence[int], grammar: GrammarSpec | None, max_tokens: int
) -> list[SampledOption]:
    """The options to check. `likely` are tokens that the model likes, for bias and penalties."""
    base = SamplingParams(0, max_tokens)

    def option(name: str, known: bool = True, **changes: object) -> SampledOption:
        return SampledOption(name, msgspec.structs.replace(base, **changes), known)

    biases = {token: -0.7 * (place + 1) for place, token in enumerate(likely[:4])}
    found = [
        option("temperature 1"),
        option("top-k", temperature=0.8, top_k=8),
        option("top-p", top_p=0.8),
        option("min-p", temperature=1.2, min_p=0.1),
        option("penalties", presence_penalty=0.6, frequency_penalty=0.4, top_k=12),
        option("repetition penalty", False, repetition_penalty=1.4, temperature=0.7),
        option("logit bias", logit_bias=biases, top_k=12),
        option("seed", has_own_seed=True, temperature=1.0),
    ]
    if grammar is not None:
        found.append(option("grammar", False, grammar=grammar))
    return found


@dataclass
class Known:
    """The bets on one set of options, at known probabilities."""

    vocab_size: int
    bets: dict[str, Bet] = field(default_factory=lambda: {name: Bet() for name in EVENTS})
    num_unknown: int = 0  # positions at which the distribution is not known
    impossible: list[tuple[int, int]] = field(default_factory=list)  # (reply, position)
    # Prefix of a reply -> drafts judged after it in earlier replies.
    _drafts: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(
        self, index: int, reply: Reply, scores: Scores, options: SamplingParams, one_hot: bool,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        """Add the tokens of a reply. `one_hot`: drafts are the drafter's likeliest tokens."""
        drafts, emitted, tolerance = reply.drafts_at(), Counter[int](), rounding.mean
        for position, (token, at) in enumerate(zip(reply.token_ids, scores, strict=False)):
            law = distribution(at, options, emitted, rounding.near_tie, self.vocab_size)
            emitted[token] += 1
            if law is None:
                self.num_unknown += 1
                continue
            if law.is_cut and token not in law.of:
                self.impossible.append((index, position))
                continue
            prefix = (*reply.prompt, *reply.token_ids[:position])
            draft = drafts.get(position)
            # A drawn draft was drawn for this token, so its probability given the draft is not p.
            # A draft of an earlier reply after the same text is independent of this token.
            judged = draft if one_hot else self._drafts.get(prefix)
            if draft is not None and judged is not None:
                self._bet(EVENTS[0], token == judged, law.probability(judged), tolerance)
            if draft is not None:
                self._drafts[prefix] = draft
            self._bet_on_ranks(token, law, tolerance)

    def _bet_on_ranks(self, token: int, law: Distribution, tolerance: float) -> None:
        listed = sorted(((p, t) for t, p in law.of.items() if t >= 0), reverse=True)
        self._bet(EVENTS[1], token == listed[0][1], listed[0][0], tolerance)
        likely = listed[:_LIKELY]
        mass = sum(p for p, _ in likely)
        if mass < 1 - 1e-6:
            # What rounding moves in the likely tokens, the others lose or gain.
            tolerance = math.log1p(mass * tolerance / (1 - mass))
            self._bet(EVENTS[2], all(token != t for _, t in likely), 1 - mass, tolerance)

    def _bet(self, name: str, hit: bool, p: float | None, tolerance: float) -> None:
        if p is not None:
            self.bets[name].add(hit, p, tolerance)


@dataclass
class Sampled:
    """The replies to one set of options, and what the tests say of them."""

    option: SampledOption
    known: Known | None
    first_seed: int
    on: list[Reply] = field(default_factory=list)
    off: list[Reply] = field(default_factory=list)
    samples: dict[str, Comparison] = field(default_factory=dict)

    async def extend(
        self,
        engine: Submits,
        subject: Subject,
        count: int,
        rounding: Rounding,
        tick: Callable[[], object],
    ) -> None:
        """Sample `count` more replies of either side."""
        option, done = self.option, len(self.on)
        prompts = [min(subject.prompts, key=len)] * count
        # The sides are independent, unless a seed must repeat its text.
        other = 0 if option.sampling.has_own_seed else _SEEDS // 2
        on, off = [
            await generate(
                engine, prompts, option.sampling, drafts=drafts, tick=tick,
                first_seed=self.first_seed + done + (0 if drafts else other),
            )
            for drafts in (True, False)
        ]  # fmt: skip
        if self.known is not None:
            scored = await score(engine, on, min(_MAX_TOP, subject.vocab_size))
            for index, (reply, scores) in enumerate(zip(on, scored, strict=True), done):
                self.known.add(index, reply, scores, option.sampling, subject.one_hot, rounding)
        self.on += on
        self.off += off


async def check_sampled(
    engine: Submits,
    subject: Subject,
    options: Sequence[SampledOption],
    plan: Plan,
    rounding: Rounding,
    report: Report,
    tick: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Sampled]:
    """Check all options with replies of either side to the shortest prompt.

    All options get the same number of replies: that of the plan, or fewer if its time is over. No
    test depends on when that is: bets may stop at any time, and two samples are compared once. The
    level of every test is its share of `FALSE_ALARM`.
    """
    level = FALSE_ALARM / (len(options) * (len(EVENTS) + _POSITIONS + 1) + len(EVENTS))
    found = [
        Sampled(option, Known(subject.vocab_size) if option.has_reference else None, _SEEDS * place)
        for place, option in enumerate(options)
    ]
    end, done = clock() + 60 * plan.minutes, 0
    while done < plan.num_samples and (not done or clock() < end):
        count = min(plan.round_samples, plan.num_samples - done)
        for sampled in found:
            await sampled.extend(engine, subject, count, rounding, tick)
        done += count
    report.setup["sampled_replies"] = done
    for sampled in found:
        option, on, off = sampled.option, sampled.on, sampled.off
        if not option.sampling.has_own_seed:
            sampled.samples = two_samples(on, off, level, rounding.mean)
        _judge(sampled, level, report)
        if option.sampling.grammar is not None:
            _judge_grammar(option.name, on, subject.valid, report)
        if option.sampling.has_own_seed:
            _judge_seeds(on, off, report, rounding.exact)
    _judge_together(found, level, report)
    return found


def two_samples(
    on: Sequence[Reply], off: Sequence[Reply], level: float, tolerance: float
) -> dict[str, Comparison]:
    """Compare the tokens at each of the first positions, and the first two tokens as a pair."""
    found: dict[str, Comparison] = {}
    for name, part in (
        *((f"token {n + 1}", slice(n, n + 1)) for n in range(_POSITIONS)),
        ("tokens 1 and 2", slice(0, 2)),
    ):
        sides: list[Counter[Hashable]] = [
            Counter(tuple(reply.token_ids[part]) for reply in side) for side in (on, off)
        ]
        found[name] = compare(sides[0], sides[1], level, tolerance)
    return found


def _judge(sampled: Sampled, level: float, report: Report) -> None:
    on, off, known = sampled.on, sampled.off, sampled.known
    errors = [reply.error for reply in (*on, *off) if reply.error]
    if errors:
        text = f"{len(errors)} of {len(on) + len(off)} requests failed: {errors[0]}"
        report.add(GROUP, sampled.option.name, False, text)
        return
    faults: list[str] = []
    figures: dict[str, Any] = {"samples": len(on)}
    for name, two in sampled.samples.items():
        figures[name] = vars(two) | {"worst": str(two.worst)}
        if two.fails:
            faults.append(f"{name} differs between the sides ({_words(two)})")
    text = ""
    if sampled.samples:
        part, widest = max(
            sampled.samples.items(), key=lambda item: item[1].total_variation / item[1].bound
        )
        text = f"total variation of {part} {widest.total_variation:.3f}, chance gives up to "
        text += f"{widest.bound:.3f}"
    if known is not None:
        if known.impossible:
            faults.append(f"{len(known.impossible)} tokens were emitted that the options forbid")
        faults += [f for name, bet in known.bets.items() if (f := _fault(name, bet, level))]
        text += "; " if text else ""
        text += _strength(known, level)
        figures |= {name: bet_figures(bet, level) for name, bet in known.bets.items()}
        figures["unknown"] = known.num_unknown
    if known is not None and not faults and least_bias(known, level) >= 1:
        report.note(GROUP, sampled.option.name, text, **figures)  # half of the check is not made
    else:
        report.add(GROUP, sampled.option.name, not faults, "; ".join(faults) or text, **figures)


def least_bias(known: Known, level: float) -> float:
    """The smallest bias that the bets on some event would show; 1 if they would show none."""
    return min(bet.detectable(level) for bet in known.bets.values())


def _strength(known: Known, level: float) -> str:
    """What the bets at known probabilities would show, or why they show nothing."""
    trials = max(bet.num_trials for bet in known.bets.values())
    least = least_bias(known, level)
    if least < 1:
        return f"{trials} tokens against known probabilities would show a bias of {percent(least)}"
    if not trials and known.num_unknown:
        return (
            "not shown against known probabilities, which the listed tokens determine at none of "
            f"{known.num_unknown} positions: a cut-off is beyond them or within rounding of a tie"
        )
    return f"not shown against known probabilities: {trials} tokens are too few to show any bias"


def _words(two: Comparison) -> str:
    a, b = two.counts
    return (
        f"total variation {two.total_variation:.3f}, chance gives {two.bound:.3f}; "
        f"{two.worst}: {a} with drafts and {b} without, p = {two.p_value:.1g}"
    )


def bet_figures(bet: Bet, level: float) -> dict[str, float]:
    return {
        "trials": bet.num_trials,
        "happened": bet.hits,
        "expected": round(bet.expected, 3),
        "bias": round(bet.excess(), 6),
        "log_wealth": round(bet.log_wealth, 3),
        "detectable_bias": round(bet.detectable(level), 6),
    }


def _fault(name: str, bet: Bet, level: float) -> str:
    """What is wrong with an event, or nothing."""
    if not bet.fails(level):
        return ""
    more = "more" if bet.excess() > 0 else "less"
    return (
        f"{name} was emitted {more} often than its probability says: {bet.hits} times instead of "
        f"{bet.expected:.1f} in {bet.num_trials} ({percent(abs(bet.excess()))} bias)"
    )


def _judge_together(found: Sequence[Sampled], level: float, report: Report) -> None:
    """Add the verdict on all options together: a common fault shows here first."""
    for name in EVENTS:
        joint = Bet()
        for sampled in found:
            if sampled.known is not None:
                joint.join(sampled.known.bets[name])
        if not joint.num_trials:
            why = "no draft was judged" if name == EVENTS[0] else "no probability was known"
            report.skip(GROUP, f"{TOGETHER}{name}", why)
            continue
        text = _fault(name, joint, level) or (
            f"{joint.hits} times, {joint.expected:.1f} expected in {joint.num_trials}; a bias of "
            f"{percent(joint.detectable(level))} would show"
        )
        figures = bet_figures(joint, level)
        report.add(GROUP, f"{TOGETHER}{name}", not joint.fails(level), text, **figures)


def _judge_seeds(on: Sequence[Reply], off: Sequence[Reply], report: Report, exact: bool) -> None:
    equal = sum(a.token_ids == b.token_ids for a, b in zip(on, off, strict=True))
    text = f"{equal} of {len(on)} replies are the same with and without drafts"
    # Rounding may decide a draw differently where two tokens are equally close to it.
    least = len(on) if exact else 0.9 * len(on)
    report.add(GROUP, "seed repeats the text", equal >= least, text, equal=equal)


def _judge_grammar(
    name: str, on: Sequence[Reply], valid: Callable[[Sequence[int]], bool], report: Report
) -> None:
    good = sum(valid(reply.token_ids) for reply in on)
    text = f"{good} of {len(on)} replies obey the grammar"
    report.add(GROUP, f"{name} is obeyed", good == len(on), text, valid=good)
