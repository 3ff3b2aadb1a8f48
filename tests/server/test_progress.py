"""How the start-up looks."""

from __future__ import annotations

import io

from slipstream.runner.messages import Progress
from slipstream.server.progress import CountProgress, StartupProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


MESSAGES = [
    Progress("load", 0, 2),
    Progress("load", 2, 2),
    Progress("kv_cache", 1, 1, "100 blocks"),
    Progress("capture", 3, 3),
]


def test_elsewhere_than_on_a_terminal_each_phase_has_two_lines() -> None:
    stream = io.StringIO()
    progress = StartupProgress(stream)
    for message in MESSAGES:
        progress(message)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading weights ..."
    assert lines[1].startswith("loading weights: done in ")
    assert lines[2] == "allocating KV blocks (100 blocks) ..."
    assert len(lines) == 6


def test_a_terminal_shows_a_bar_that_fills() -> None:
    stream = Terminal()
    progress = StartupProgress(stream)
    for message in MESSAGES:
        progress(message)
    progress.close()
    shown = stream.getvalue()
    assert "loading weights:   0%" in shown and "loading weights: 100%" in shown
    assert "100 blocks" in shown and "capturing CUDA graphs: 100%" in shown


def test_closing_before_anything_happened_prints_nothing() -> None:
    stream = io.StringIO()
    StartupProgress(stream).close()
    assert stream.getvalue() == ""


def test_what_is_done_is_a_line_now_and_then_and_the_last_one() -> None:
    stream, now = io.StringIO(), 0.0
    with CountProgress("run", 30, "replies", stream, lambda: now) as progress:
        assert stream.getvalue() == "run: 0 of 30 replies\n"
        for _ in range(30):
            now += 1.5
            progress.update()
    done = [int(line.split()[1]) for line in stream.getvalue().splitlines()]
    assert done == [0, 7, 14, 21, 28, 30]


def test_what_is_done_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with CountProgress("run", 3, "replies", stream) as progress:
        for _ in range(3):
            progress.update()
    assert "run:   0%" in stream.getvalue() and "run: 100%" in stream.getvalue()
    assert "3/3" in stream.getvalue() and "replies" not in stream.getvalue()
