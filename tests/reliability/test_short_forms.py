"""Each script of this folder for a few seconds; its long form is for the command line."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from ..end_to_end.running_server import RunningServer
from . import conformance, fuzz, kill_worker, loop, slow_clients, soak

# Refused or short: what costs the worker much is for the long form.
SHORT_LOOP = [
    *("prompt of 8 MB", "chat of special tokens", "unknown field of 15 MB", "arguments of 8 MB"),
    *("wrong allowed_token_ids", "16 stops of 0.2 MB, n = 16", "tokenize 0.5 MB with strings"),
]


@pytest.fixture(scope="module")
def hardened() -> Iterator[RunningServer]:
    """A server that loses patience soon, for tests that a default one would outlast."""
    running = RunningServer(*slow_clients.FLAGS, *soak.FLAGS)
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, "".join(running.log)


def test_answers_conform_to_the_api_document(hardened: RunningServer) -> None:
    faults = conformance.run(hardened, examples=4, seconds=12)
    assert not faults, "\n".join(faults)


def test_large_bodies_hold_up_neither_event_loop_nor_streams(hardened: RunningServer) -> None:
    """The bounds are 100 ms and 250 ms; a machine that runs other tests gets three times that, and
    four times for the stream, whose steps wait for a core. Before, these took seconds."""
    faults = loop.run(hardened, SHORT_LOOP, 3 * loop.MAX_LAG, 4 * loop.MAX_GAP)
    assert not faults, "\n".join(faults)


def test_slow_loris_is_cut_and_delays_nobody(hardened: RunningServer) -> None:
    faults = asyncio.run(slow_clients.slow_loris(hardened, clients=20))
    assert not faults, "\n".join(faults)


def test_client_that_does_not_read_is_cut_and_delays_nobody(hardened: RunningServer) -> None:
    faults = asyncio.run(slow_clients.deaf_client(hardened))
    assert not faults, "\n".join(faults)


def test_killed_worker_fails_every_open_request_within_two_seconds(
    hardened: RunningServer,
) -> None:
    faults = kill_worker.run(hardened, [signal.SIGKILL], seed=0, timeout=0)
    assert not faults, "\n".join(faults)


def test_fuzzed_bodies_get_no_server_error_and_leave_nothing(server: RunningServer) -> None:
    faults = fuzz.run(server, bodies=200, seed=1)
    assert not faults, "\n".join(faults)


def test_mixed_load_with_aborts_leaves_nothing(hardened: RunningServer) -> None:
    faults = soak.run(hardened, seconds=6, seed=0, parallel=6, pauses=2)
    assert not faults, "\n".join(faults)
