"""How the start-up looks."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys

import pytest

from slipstream.runner.messages import Progress
from slipstream.server.engine.engine_client import WorkerFailed
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
    with StartupProgress(stream) as progress:
        for message in MESSAGES:
            progress(message)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading weights ..."
    assert lines[1].startswith("loading weights: done in ")
    assert lines[2] == "allocating KV blocks (100 blocks) ..."
    assert len(lines) == 6


def test_a_terminal_shows_a_bar_that_fills() -> None:
    stream = Terminal()
    with StartupProgress(stream) as progress:
        for message in MESSAGES:
            progress(message)
    shown = stream.getvalue()
    assert "loading weights:   0%" in shown and "loading weights: 100%" in shown
    assert "100 blocks" in shown and "capturing CUDA graphs: 100%" in shown


def test_closing_before_anything_happened_prints_nothing() -> None:
    stream = io.StringIO()
    with StartupProgress(stream):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("error", [WorkerFailed("no such model"), asyncio.CancelledError()])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_phase_that_fails_is_not_done(error: BaseException, count: int) -> None:
    """Nor is one whose every part was there: it may fail afterwards."""
    stream, terminal = io.StringIO(), Terminal()
    for shown in (stream, terminal):
        with pytest.raises(type(error)), StartupProgress(shown) as progress:
            for message in MESSAGES[:count]:
                progress(message)
            raise error
    lines = stream.getvalue().splitlines()
    name = "allocating KV blocks" if count == 3 else "loading weights"
    assert re.fullmatch(f"{name}: stopped after [0-9.]+ s", lines[-1])
    done = [line for line in lines if "done" in line]
    assert len(done) == (count == 3) and all("loading" in line for line in done)
    assert terminal.getvalue().endswith("\n") and "done" not in terminal.getvalue()


def test_what_is_done_is_a_line_now_and_then_and_the_last_one() -> None:
    stream, now = io.StringIO(), 0.0
    with CountProgress("run", 30, "replies", stream, lambda: now) as progress:
        assert stream.getvalue() == "run: 0 of 30 replies\n"
        for _ in range(30):
            now += 1.5
            progress.update()
    done = [int(line.split()[1]) for line in stream.getvalue().splitlines()]
    assert done == [0, 7, 14, 21, 28, 30]


def test_what_stops_early_says_after_how_many() -> None:
    stream, terminal = io.StringIO(), Terminal()
    for shown in (stream, terminal):
        with (
            pytest.raises(asyncio.CancelledError),
            CountProgress("run", 3, "replies", shown, lambda: 0.0) as progress,
        ):
            progress.update()
            progress.update()
            raise asyncio.CancelledError
    assert stream.getvalue().splitlines()[-1] == "run: stopped after 2 of 3 replies"
    assert "stopped" not in terminal.getvalue() and "2/3" in terminal.getvalue()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_stops_neither_start_nor_count() -> None:
    with StartupProgress(FullDisk()) as startup, CountProgress("run", 2, "n", FullDisk()) as count:
        startup(MESSAGES[0])
        count.update()


def test_what_is_done_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with CountProgress("run", 3, "replies", stream) as progress:
        for _ in range(3):
            progress.update()
    assert "run:   0%" in stream.getvalue() and "run: 100%" in stream.getvalue()
    assert "3/3" in stream.getvalue() and "replies" not in stream.getvalue()


def test_bars_start_no_process_that_would_tell_of_leaks() -> None:
    """Where Python does not fork, a lock for processes has a tracker, which outlives a kill."""
    code = """
import io, multiprocessing, sys
import psutil
from tqdm import tqdm
from slipstream.runner.messages import Progress
from slipstream.server.progress import CountProgress, StartupProgress

multiprocessing.set_start_method("spawn")
class Terminal(io.StringIO):
    isatty = lambda self: True
for shown in (StartupProgress(Terminal()), CountProgress("x", 2, "y", Terminal())):
    with shown:
        if isinstance(shown, StartupProgress):
            shown(Progress("load", 0, 2))
assert not psutil.Process().children(), [c.cmdline() for c in psutil.Process().children()]
tqdm.get_lock()
assert not psutil.Process().children()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
