"""Which drafters the watchdog stops, and when it lets them draft again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from slipstream.speculators.draft_length.controller import DraftController
from slipstream.speculators.draft_length.step_costs import StepCosts
from slipstream.speculators.draft_length.watchdog import Watchdog

K = 3


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def feed(watchdog: Watchdog, rate: float, drafts: int, text: Sequence[int] = ()) -> None:
    """Feed drafts in steps of ten, with the given share accepted."""
    for step in range(drafts // 10):
        right = int(rate * 10 * (step + 1)) - int(rate * 10 * step)
        texts = [text] if watchdog.wants_texts else []
        watchdog.observe(10, right, texts)


LOOP, PROSE = [7, 8, 9] * 60, list(range(180))


@pytest.mark.parametrize(
    ("before", "after", "text", "trouble"),
    [
        (0.6, 0.0, PROSE, "zero"),
        (0.6, 1.0, LOOP, "loop"),
    ],
)
def test_a_broken_drafter_is_stopped_and_found_healthy_again(
    before: float,
    after: float,
    text: list[int],
    trouble: str,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watchdog = Watchdog("eagle3", clock)
    chooser = DraftController((3,), 1, StepCosts({}, K), watchdog=watchdog)
    chooser.restart(0, None, greedy=True)
    feed(watchdog, before, 2000, PROSE)
    assert watchdog.is_healthy and chooser.choose([0]).reason == "fixed"
    with caplog.at_level(logging.INFO):
        feed(watchdog, after, 400, text)
    assert (chooser.choose([0]).num_drafts, chooser.choose([0]).reason) == (0, "unhealthy")
    assert watchdog.num_troubles[trouble] == 1 and sum(watchdog.num_troubles.values()) == 1
    assert f"drafter eagle3, {100 * after:.0f} % accepted, 60 % before)" in caplog.text
    assert "In 10 s a few drafts are tried; if they are accepted" in caplog.text
    clock.now += 11  # a probe, in vain
    assert chooser.choose([0]).reason == "health_probe" and chooser.choose([0]).num_drafts > 0
    with caplog.at_level(logging.INFO):
        feed(watchdog, after, 40, text)
    assert "stays off" in caplog.text and "the next probe is in 20 s" in caplog.text
    assert chooser.choose([0]).reason == "unhealthy"
    clock.now += 11  # the wait has become longer
    assert chooser.choose([0]).reason == "unhealthy"
    clock.now += 10
    assert chooser.choose([0]).reason == "health_probe"
    with caplog.at_level(logging.INFO):
        feed(watchdog, before, 40, PROSE)
    assert watchdog.is_healthy and chooser.choose([0]).reason == "fixed"
    assert "speculation is on again" in caplog.text


def test_zero_is_noticed_at_two_hundred_drafts_whenever_they_begin(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog("mtp", clock)
    feed(watchdog, 0.5, 130)
    feed(watchdog, 0.0, 190)
    assert watchdog.is_healthy
    feed(watchdog, 0.0, 10)
    assert not watchdog.is_healthy and "% before" in caplog.text
    clock.now += 11
    assert watchdog.state() == "probe"
    feed(watchdog, 0.0, 30)
    assert watchdog.state() == "probe"  # drafts before it are not a part of it
    feed(watchdog, 0.0, 10)
    assert watchdog.state() == "off"
    caplog.clear()
    feed(Watchdog("mtp", clock), 0.0, 200)
    assert "(drafter mtp, 0 % accepted)." in caplog.text  # there was nothing before


def test_a_right_drafter_of_a_text_that_goes_on_is_left_alone(clock: Clock) -> None:
    watchdog = Watchdog("draft_model", clock)
    feed(watchdog, 1.0, 2000, PROSE)
    feed(watchdog, 0.9, 400, LOOP)  # loops, but the drafter errs: no degenerate pair
    feed(watchdog, 0.3, 2000, PROSE)  # other traffic
    watchdog.observe(200, 200, [LOOP, PROSE])  # the drafter is right about the second text
    watchdog.observe(200, 200)  # in one step, so that no texts were asked for
    assert watchdog.is_healthy


def test_a_drop_warns_once_and_drafting_goes_on(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A healthy head was once stopped twice in a minute because the texts changed."""
    watchdog = Watchdog("eagle3", clock)
    feed(watchdog, 0.6, 2000, PROSE)
    feed(watchdog, 0.05, 2000, PROSE)
    assert watchdog.is_healthy and watchdog.state() == "healthy"
    assert watchdog.num_troubles == {"zero": 0, "drop": 1, "loop": 0}
    assert caplog.text.count("acceptance has dropped") == 1
    assert "5 % of the last 200 drafts were accepted, 60 % before (drafter eagle3)" in caplog.text
    feed(watchdog, 0.6, 2000, PROSE)
    feed(watchdog, 0.05, 400, PROSE)  # again, from the level that was usual in between
    assert watchdog.num_troubles["drop"] == 2 and watchdog.is_healthy
    feed(watchdog, 0.0, 400, PROSE)
    assert not watchdog.is_healthy and watchdog.num_troubles["zero"] == 1


def test_a_low_but_living_probe_ends_the_pause(clock: Clock) -> None:
    watchdog = Watchdog("eagle", clock)
    feed(watchdog, 0.8, 2000)
    feed(watchdog, 0.0, 200)
    assert not watchdog.is_healthy
    clock.now += 11
    assert watchdog.state() == "probe" and not watchdog.is_healthy
    feed(watchdog, 0.1, 40)
    assert watchdog.is_healthy


def test_a_drop_from_little_is_not_reported(clock: Clock) -> None:
    watchdog = Watchdog("ngram", clock)
    feed(watchdog, 0.1, 2000)
    watchdog.observe(200, 2)
    assert not any(watchdog.num_troubles.values())


@pytest.mark.parametrize("renewed", [False, True])
def test_the_first_pause_of_a_drafter_that_was_healthy_is_short(
    renewed: bool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog("eagle", clock)
    feed(watchdog, 0.0, 200)
    clock.now += 11
    assert watchdog.state() == "probe"
    feed(watchdog, 0.0, 40)  # the next pause is longer
    if renewed:
        watchdog.new_drafter()
    else:
        clock.now += 21
        assert watchdog.state() == "probe"
        feed(watchdog, 0.5, 240)
    caplog.clear()
    feed(watchdog, 0.0, 200)
    assert not watchdog.is_healthy and "In 10 s a few drafts" in caplog.text
