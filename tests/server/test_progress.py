"""How the start-up looks."""

from __future__ import annotations

import io

from slipstream.runner.messages import Progress
from slipstream.server.progress import StartupProgress


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
