"""Requests go to the least loaded engine, and among equals to the one that knows the prompt."""

from __future__ import annotations

from slipstream.server.engine.engines import Router

PROMPT = list(range(300))


def test_equal_engines_take_turns() -> None:
    router = Router(3)
    assert [router.choose([n], "", [0, 0, 0]) for n in range(4)] == [0, 1, 2, 0]


def test_the_longest_known_prefix_decides_among_the_least_loaded() -> None:
    router = Router(2)
    assert router.choose(PROMPT, "", [0, 0]) == 0
    assert router.choose([7, *PROMPT], "", [0, 0]) == 1
    for _ in range(3):
        assert router.choose([*PROMPT, 5], "", [1, 0]) == 0  # one more open request is no reason
    assert router.choose([*PROMPT[:130], 5], "", [0, 0]) == 0  # two whole blocks are known
    assert router.choose(PROMPT, "", [2, 0]) == 1  # two more are
    assert router.choose(PROMPT, "", [18, 16]) == 1  # known by both now: fewer requests
    assert router.choose([*range(128), 9], "", [18, 16]) == 1


def test_salts_and_short_prompts_share_nothing() -> None:
    router = Router(2)
    assert router.choose(PROMPT, "a", [0, 0]) == 0
    assert router.choose(PROMPT, "b", [1, 0]) == 1
    assert router.choose(PROMPT[:63], "a", [1, 0]) == 1


def test_engines_that_are_not_ready_get_nothing_and_forget() -> None:
    router = Router(2)
    assert router.choose(PROMPT, "", [0, 0]) == 0
    assert router.choose(PROMPT, "", [None, 5]) == 1
    assert router.choose(PROMPT, "", [None, None]) is None
    router.forget(1)
    assert router.choose(PROMPT, "", [1, 0]) == 0
