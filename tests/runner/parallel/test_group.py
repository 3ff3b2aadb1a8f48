"""The first rank's hold on processes that no longer answer, as when their GPUs wait for ever."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.configs.schema import Config, ModelConfig, ParallelConfig
from slipstream.runner.parallel import group as group_module
from slipstream.runner.parallel import rank_processes
from slipstream.runner.parallel.group import RankFailed, RankGroup
from slipstream.runner.process import Hosted

# What a main thread does that waits for a kernel: it neither returns nor handles a signal.
SPINS = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
signal.alarm(60)  # so that none outlives a failed test
print(flush=True)
while True:
    pass
"""
CONFIG = Config(model=ModelConfig(device="cpu"), parallel=ParallelConfig(3))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of ranks 1 and 2, which spin."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*args: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-E", "-c", SPINS]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        processes.append(process)
        return process

    monkeypatch.setattr(rank_processes, "start_process", start)
    monkeypatch.setattr(group_module, "_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(group_module, "_LAST_WORDS_SECONDS", 0.05)
    monkeypatch.setattr(group_module, "_STOP_SECONDS", 0.05)
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_group_that_cannot_listen_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = Hosted("203.0.113.1", "")  # an address that is kept for documents
    with pytest.raises(OSError, match="assign requested address"):
        RankGroup(CONFIG, lambda sentence: None, elsewhere, lambda message: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["abandon", "shutdown"])
def test_ranks_that_spin_are_killed(way: str, started: list[subprocess.Popen[bytes]]) -> None:
    group = RankGroup(CONFIG, lambda sentence: None)
    folder = Path(group.rendezvous).parent
    assert [process.poll() for process in started] == [None, None] and folder.exists()
    getattr(group, way)()
    assert [process.returncode for process in started] == [-9, -9] and not folder.exists()


def test_a_dead_rank_ends_the_first_one_while_it_spins(
    started: list[subprocess.Popen[bytes]],
) -> None:
    """The first rank's main thread waits in a sum; a thread beside it tells, and kills."""
    told: list[str] = []
    noticed = threading.Event()

    def on_hang(sentence: str) -> None:
        told.append(sentence)
        noticed.set()

    group = RankGroup(CONFIG, on_hang)
    started[0].kill()
    assert noticed.wait(20)  # where the real one ends the process, and the system its children
    assert told == ["tensor-parallel rank 1 was killed by SIGKILL"]
    with pytest.raises(RankFailed, match="rank 1 was killed"):
        group.check()
    assert started[1].poll() is None
    group.abandon()
    assert started[1].returncode == -9
