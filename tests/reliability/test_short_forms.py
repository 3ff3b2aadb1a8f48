"""Runs each script of this folder for a few seconds; the long checks run from the command line."""

from __future__ import annotations

import asyncio
import signal

import pytest

from ..end_to_end.running_server import RunningServer
from . import conformance, fuzz, grammars, kill_worker, loop, slow_clients, soak

# Bodies that are rejected or cheap; the long check also sends those that cost the worker much.
SHORT_LOOP = [
    *("prompt of 8 MB", "chat of special tokens", "unknown field of 15 MB", "arguments of 8 MB"),
    *("wrong allowed_token_ids", "16 stops of 0.2 MB, n = 16", "tokenize 0.5 MB with strings"),
]


def test_answers_conform_to_the_api_document(hardened: RunningServer) -> None:
    faults = conformance.run(hardened, examples=3)
    assert not faults, "\n".join(faults)


def test_large_bodies_delay_neither_the_event_loop_nor_streams(
    hardened: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long check allows 100 ms for the event loop and 250 ms for a stream.

    Here it is 3 and 4 times that, because other tests may run on the machine at the same time."""
    monkeypatch.setattr(loop, "SETTLE_SECONDS", 0.1)
    faults = loop.run(hardened, SHORT_LOOP, 3 * loop.MAX_LAG, 4 * loop.MAX_GAP)
    assert not faults, "\n".join(faults)


def test_hostile_grammars_delay_a_step_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long check allows 0.2 s for the masks of a step, with one grammar and with several.

    Here it is twice that. Before their sum had a limit, four grammars delayed a step by 0.3 s.
    """
    monkeypatch.setattr(grammars, "SECONDS", 1.0)
    own = grammars.preset_vocabulary()
    faults = grammars.run([lambda: own], ["letters", "e e"], [1, 4], [4], 2 * grammars.MAX_HOLD)
    assert not faults, "\n".join(faults)


def test_slow_senders_are_cut_off_and_delay_nobody(hardened: RunningServer) -> None:
    faults = asyncio.run(slow_clients.slow_loris(hardened, clients=20))
    assert not faults, "\n".join(faults)


def test_a_client_that_does_not_read_is_cut_off_and_delays_nobody(hardened: RunningServer) -> None:
    faults = asyncio.run(slow_clients.unread_stream(hardened))
    assert not faults, "\n".join(faults)


def test_after_the_worker_is_killed_every_open_request_fails_within_two_seconds(
    hardened: RunningServer,
) -> None:
    faults = kill_worker.run(hardened, [signal.SIGKILL], seed=0, timeout=0)
    assert not faults, "\n".join(faults)


def test_fuzzed_bodies_cause_no_server_error_and_no_leak(hardened: RunningServer) -> None:
    faults = fuzz.run(hardened, bodies=60, seed=1)
    assert not faults, "\n".join(faults)


def test_mixed_load_with_aborts_does_not_leak(hardened: RunningServer) -> None:
    """The client drops about half of these requests: some at once, some in the middle."""
    faults = soak.run(hardened, 0, seed=0, parallel=4, pauses=2, requests=24, patience=0.1)
    assert not faults, "\n".join(faults)
