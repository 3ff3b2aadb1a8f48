"""The choice between two heads on synthetic measurements, which must not depend on noise."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence

import pytest

from slipstream.runner.messages import RequestOutput
from slipstream.server.drafters.head_verdict import Measurement, compare, judge

PROMPTS, TOKENS, DEEPEST = 32, 48, 5
TRIALS = 40
Head = list[list[list[bool]]]  # by prompt, token and position: whether that draft is right


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile. The verdicts depend on seeds only, but these tests make so many
    objects that they would collect what earlier tests left open, whose warnings are errors."""
    gc.disable()
    yield
    gc.enable()


def step(drafts: int, accepted: int, token: int = 7) -> RequestOutput:
    return RequestOutput(
        "", [token] * (accepted + 1), num_draft_tokens=drafts, num_accepted_tokens=accepted
    )


def head(rng: random.Random, quality: float) -> Head:
    """Right with a chance that depends on the prompt; `quality` scales it."""
    chances = [quality * (0.45 + 0.4 * i / PROMPTS) for i in range(PROMPTS)]
    return [
        [[rng.random() < chance for _ in range(DEEPEST)] for _ in range(TOKENS)]
        for chance in chances
    ]


def measured(made: Head, rng: random.Random) -> Measurement:
    """A probe of a head while other requests come and go: they decide how many drafts each step
    has, and so where the next one begins."""
    found, busy = Measurement(), rng.random()
    for prompt, right in enumerate(made):
        at = 0
        while at < TOKENS:
            drafts = rng.choice((0, 1, 2, 3)) if rng.random() < busy else DEEPEST
            accepted = 0
            while accepted < drafts and right[at][accepted]:
                accepted += 1
            found.add(prompt, step(drafts, accepted))
            at += accepted + 1
    return found


def verdicts(quality: float, same: bool = False) -> list[tuple[bool, str]]:
    """Of trials of a new head against one of quality 1."""
    found = []
    for seed in range(TRIALS):
        rng = random.Random(seed)
        old = head(rng, 1.0)
        new = old if same else head(rng, quality)
        found.append(judge(measured(old, rng), measured(new, rng), False))
    return found


def share_kept(quality: float) -> float:
    return sum(keep for keep, _ in verdicts(quality)) / TRIALS


def test_a_head_always_equals_itself_whatever_else_runs() -> None:
    for keep, why in verdicts(1.0, same=True):
        new, old = (float(word) for word in why.rstrip().split() if word[0].isdigit())
        assert keep and new == old > 1.5


def test_a_clearly_worse_head_is_refused_and_one_as_good_is_seldom() -> None:
    """The two heads err independently, which is noisier than real heads of one target are."""
    assert share_kept(0.75) == 0 and share_kept(1.0) >= 0.9 and share_kept(1.1) >= 0.97


def test_the_error_is_the_standard_deviation_of_the_difference() -> None:
    differences, errors = [], []
    for seed in range(TRIALS):
        rng = random.Random(seed)
        found = compare(measured(head(rng, 1.0), rng), measured(head(rng, 1.0), rng))
        differences.append(found.new - found.old)
        errors.append(found.error)
    spread = (sum(each**2 for each in differences) / TRIALS) ** 0.5
    assert sum(errors) / TRIALS == pytest.approx(spread, rel=0.25)


def probe(*texts: Sequence[tuple[int, int]]) -> Measurement:
    """Steps as (drafts, accepted), by text."""
    found = Measurement()
    for prompt, steps in enumerate(texts):
        found.add(prompt, RequestOutput("", [7]))  # from the prefill
        for drafts, accepted in steps:
            found.add(prompt, step(drafts, accepted))
    return found


def test_a_head_that_is_worse_in_every_text_alike_is_worse() -> None:
    """Without noise, one draft of a hundred is enough."""
    before, after = [(1, 0)] * 50 + [(1, 1)], [(1, 0)] * 51
    old, new = probe(*[before] * 4), probe(*[after] * 4)
    figures = "1.000 tokens per verify step on the probe, the running drafter 1.020"
    noise = "a difference of up to 0.000 may be noise"
    assert judge(old, new, False) == (False, f"worse: {figures}; {noise}")
    assert judge(old, new, True) == (True, f"worse, but forced: {figures}; {noise}")
    assert judge(new, old, False)[0] and judge(old, old, False)[0]


def test_a_small_difference_within_the_noise_is_reported_as_noise() -> None:
    right, wrong = [(2, 2)], [(2, 0)]
    old = probe(*[right] * 20, *[wrong] * 21)
    new = probe(*[right] * 19, *[wrong] * 21, [(2, 1)])
    keep, why = judge(old, new, False)
    assert keep and why == (
        "not worse: 1.951 tokens per verify step on the probe, the running drafter 1.976; "
        "a difference of up to 0.099 may be noise"
    )


def test_the_tolerance_is_at_most_a_twentieth() -> None:
    right, wrong = [(2, 2)], [(2, 0)]
    old = probe(*[right] * 20, *[wrong] * 20)
    found = compare(old, probe(*[right] * 17, *[wrong] * 23))
    assert found.tolerance == pytest.approx(0.1) and 0.15 < 2 * found.error
    assert found.new == pytest.approx(1.85) and found.is_worse
    assert not compare(old, probe(*[right] * 19, *[wrong] * 21)).is_worse


def test_a_single_text_does_not_show_the_noise() -> None:
    assert compare(probe([(1, 1)] * 10), probe([(1, 1)] * 10)).tolerance == pytest.approx(0.1)


def test_steps_are_compared_over_common_drafts_and_common_starts() -> None:
    found = compare(probe([(4, 2), (1, 0), (3, 3)]), probe([(2, 0), (5, 1), (3, 3)]))
    # Token 1 (two drafts: 2 and 0 accepted) and 4 (one: 0 and 1). At 2 and 5 only one head starts.
    assert (found.num_steps, found.old, found.new) == (2, 2.0, 1.5)
    shallow, deep = probe([(1, 1), (1, 1)]), probe([(5, 1), (5, 4)])
    assert compare(shallow, deep).new == compare(shallow, deep).old == 2


def test_nothing_is_compared_after_a_difference_of_the_texts() -> None:
    old, new = probe([(1, 0)] * 3), probe([(1, 0)])
    new.add(0, step(1, 0, token=8))
    new.add(0, step(1, 1))
    assert compare(old, new).num_steps == 2


def test_without_drafts_at_common_positions_the_running_head_stays() -> None:
    none, some = probe([(0, 0)]), probe([(1, 0)])
    assert judge(none, none, False) == (False, "neither drafter made any drafts on the probe")
    assert judge(none, some, False) == (False, "the running drafter made no drafts on the probe")
    nowhere = "the two drafters made no drafts at the same positions of the probe"
    assert judge(some, none, False) == (False, nowhere)
    assert judge(none, some, True)[0] and judge(some, none, True)[0]
