"""Random traffic over tiny pools: every text equals the plain model's, and nothing leaks."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.runner.messages import (
    AbortRequests,
    AddRequest,
    ResetPrefixCache,
    unpack_logprobs,
)
from slipstream.runner.scheduling.kv_blocks import BlockGroup

from ..schedule_bench import PARITY, Bench, add, expected_output

MAX_MODEL_LEN = 40
NUM_SEEDS = int(os.environ.get("SLIPSTREAM_TEST_SEEDS", "60"))
PREFIX = [7, 3, 9, 3, 7, 1, 1, 2, 8, 5, 4, 4, 6, 9, 2, 2, 5, 1, 8, 8, 3]

traffic = st.lists(
    st.fixed_dictionaries(
        {
            "shared": st.integers(0, len(PREFIX)),
            "own": st.lists(st.integers(1, 5), min_size=1, max_size=14),
            "max_tokens": st.integers(1, 30),
            "min_tokens": st.integers(0, 3),
            "priority": st.integers(-1, 1),
            "arrives": st.integers(0, 25),
            "aborts": st.one_of(st.none(), st.integers(0, 30)),
            "drafts": st.sampled_from([None, None, None, 0, 2]),
            "speculative": st.booleans(),
            "grammar": st.sampled_from([False, False, False, True]),
            "prompt_logprobs": st.sampled_from([None, None, 2]),
        }
    ),
    min_size=1,
    max_size=9,
)
pools = st.sampled_from(
    [
        (BlockGroup(64, 4),),
        (BlockGroup(12, 4),),  # one request of 40 tokens and a little more
        (BlockGroup(45, 1),),
        (BlockGroup(26, 4, 6),),  # a sliding window alone
        (BlockGroup(12, 4), BlockGroup(14, 4, 5)),
        (BlockGroup(21, 2), BlockGroup(12, 4), BlockGroup(30, 4, 9)),
    ]
)
setups = st.fixed_dictionaries(
    {
        "groups": pools,
        "num_drafts": st.integers(0, 5),
        "num_lookahead_tokens": st.sampled_from([0, 0, 5]),
        "async_scheduling": st.booleans(),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(5, 20),
        "chunked": st.sampled_from([True, True, True, False]),
        "caching": st.sampled_from([True, True, False]),
        "draft_accuracy": st.sampled_from([0.0, 0.6, 0.95, 1.0]),
        "lazy": st.booleans(),
        "trim": st.booleans(),
        "device": st.sampled_from(["cpu", "cuda:0"]),
        "kv_needs_next_token": st.booleans(),
        "vocab_size": st.sampled_from([12, 40]),
        "seed": st.integers(0, 9),
    }
)


@settings(suppress_health_check=list(HealthCheck))
@given(traffic, setups, st.sets(st.integers(0, 40), max_size=2))
def test_any_traffic_gives_the_plain_models_text(
    requests: list[dict[str, Any]], setup: dict[str, Any], resets: set[int]
) -> None:
    run_traffic(requests, setup, resets)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_heavy_traffic_gives_the_plain_models_text(seed: int) -> None:
    run_traffic(*heavy_traffic(random.Random(seed)), resets={9})


def test_heavy_traffic_is_heavy() -> None:
    """The seeds above reach the paths that they were chosen for."""
    benches = [run_traffic(*heavy_traffic(random.Random(seed)), resets={9}) for seed in range(20)]
    for name in ("num_preemptions", "prefix_cache_hits", "num_accepted_tokens", "num_plain_steps"):
        reached = sum(getattr(bench.totals, name) > 0 for bench in benches)
        assert reached >= 10, f"{name}: {reached} of 20"


def heavy_traffic(rng: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Many requests at once, always with drafts, over pools that hold two or three of them."""
    requests = [
        {
            "shared": rng.randint(0, len(PREFIX)),
            "own": [rng.randint(1, 5) for _ in range(rng.randint(1, 10))],
            "max_tokens": rng.randint(1, 30),
            "min_tokens": rng.randint(0, 20),
            "priority": rng.choice([0, 0, 0, -1, 1]),
            "arrives": rng.randint(0, 25),
            "aborts": rng.choice([None] * 5 + [rng.randint(0, 40)]),
            "drafts": rng.choice([None] * 6 + [0, 1, 3]),
            "speculative": rng.random() < 0.9,
            "grammar": rng.random() < 0.25,
            "prompt_logprobs": rng.choice([None] * 5 + [2]),
        }
        for _ in range(14)
    ]
    setup = {
        "groups": rng.choice(
            [
                (BlockGroup(24, 2),),
                (BlockGroup(14, 4),),
                (BlockGroup(30, 2, 6),),
                (BlockGroup(16, 4), BlockGroup(24, 2, 5)),
            ]
        ),
        "num_drafts": rng.randint(1, 5),
        "num_lookahead_tokens": rng.choice([0, 5]),
        "async_scheduling": rng.random() < 0.8,
        "max_num_seqs": rng.randint(2, 6),
        "max_num_batched_tokens": rng.randint(6, 30),
        "chunked": rng.random() < 0.8,
        "caching": rng.random() < 0.9,
        "draft_accuracy": rng.choice([0.3, 0.7, 0.95]),
        "lazy": rng.random() < 0.7,
        "trim": rng.random() < 0.5,
        "device": rng.choice(["cpu", "cuda:0"]),
        "kv_needs_next_token": rng.random() < 0.5,
        "vocab_size": rng.choice([24, 40]),
        "seed": rng.randint(0, 99),
    }
    return requests, setup


def run_traffic(requests: list[dict[str, Any]], setup: dict[str, Any], resets: set[int]) -> Bench:
    if not setup["chunked"]:
        setup["max_num_batched_tokens"] = MAX_MODEL_LEN
    if setup["num_drafts"] == 0:
        setup["num_lookahead_tokens"] = 0
    bench = Bench(max_model_len=MAX_MODEL_LEN, **setup)
    messages = [message_of(number, spec) for number, spec in enumerate(requests)]
    last_event = max(max(r["arrives"], r["aborts"] or 0) for r in requests)
    tick = 0
    while tick <= last_event or bench.engine.has_work():
        for number, spec in enumerate(requests):
            if spec["arrives"] == tick:
                bench.engine.handle([messages[number]])
            if spec["aborts"] == tick:
                bench.engine.handle([AbortRequests([f"r{number}", "nobody"])])
        if tick in resets:
            bench.engine.handle([ResetPrefixCache()])
        if bench.engine.has_work():
            bench.step()
        tick += 1
    bench.check_idle()
    for message, spec in zip(messages, requests, strict=True):
        check_outputs(bench, message, spec)
    return bench


def message_of(number: int, spec: dict[str, Any]) -> AddRequest:
    return add(
        f"r{number}",
        PREFIX[: spec["shared"]] + spec["own"],
        spec["max_tokens"],
        min_tokens=spec["min_tokens"],
        priority=spec["priority"],
        speculative_enabled=spec["speculative"],
        speculative_max_tokens=spec["drafts"],
        grammar=PARITY if spec["grammar"] else None,
        prompt_logprobs=spec["prompt_logprobs"],
    )


def check_outputs(bench: Bench, message: AddRequest, spec: dict[str, Any]) -> None:
    received = bench.received.get(message.request_id)
    aborted = spec["aborts"] is not None and spec["aborts"] >= spec["arrives"]
    if aborted and (received is None or received.finish_reason is None):
        vocab_size = bench.runner.facts.vocab_size
        tokens, _ = expected_output(message, vocab_size, MAX_MODEL_LEN)
        got = received.token_ids if received else []
        assert got == tokens[: len(got)]
        return
    assert received is not None
    bench.expect(message)
    if spec["prompt_logprobs"] is not None:
        packed = received.outputs[0].prompt_logprobs
        assert packed is not None
        logprobs = unpack_logprobs(packed)
        assert logprobs[0] is None and len(logprobs) == len(message.prompt_token_ids)
        ids = [item.token_id for item in logprobs if item is not None]
        assert ids == message.prompt_token_ids[1:]
        assert received.outputs[0].num_cached_tokens == 0
    assert all(output.prompt_logprobs is None for output in received.outputs[1:])
