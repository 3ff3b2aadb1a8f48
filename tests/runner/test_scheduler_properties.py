"""Random traffic over tiny pools: every request's text is the plain model's, and nothing leaks."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream.runner.kv_blocks import BlockGroup
from slipstream.runner.messages import AbortRequests, ResetPrefixCache

from .scheduling import PARITY, Bench, add, expected_output

MAX_MODEL_LEN = 40
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
        "drop_last_matched_block": st.booleans(),
        "vocab_size": st.sampled_from([12, 40]),
        "seed": st.integers(0, 9),
    }
)


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(traffic, setups, st.sets(st.integers(0, 40), max_size=2))
def test_any_traffic_gives_the_plain_models_text(
    requests: list[dict], setup: dict, resets: set[int]
) -> None:
    if not setup["chunked"]:
        setup["max_num_batched_tokens"] = MAX_MODEL_LEN
    if setup["num_drafts"] == 0:
        setup["num_lookahead_tokens"] = 0
    bench = Bench(max_model_len=MAX_MODEL_LEN, **setup)
    messages = {}
    for number, spec in enumerate(requests):
        messages[number] = add(
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
    for number, spec in enumerate(requests):
        check(bench, messages[number], spec)


def check(bench: Bench, message: object, spec: dict) -> None:
    aborted = spec["aborts"] is not None and spec["aborts"] >= spec["arrives"]
    tokens, _ = expected_output(message, bench.runner.facts.vocab_size, MAX_MODEL_LEN)  # type: ignore[arg-type]
    received = bench.received.get(message.request_id)  # type: ignore[attr-defined]
    if aborted and (received is None or received.finish_reason is None):
        got = received.token_ids if received else []
        assert got == tokens[: len(got)]
        return
    assert received is not None
    bench.expect(message)  # type: ignore[arg-type]
    if spec["prompt_logprobs"] is not None:
        logprobs = received.outputs[0].prompt_logprobs
        assert logprobs is not None and logprobs[0] is None
        prompt = message.sampling and message.prompt_token_ids  # type: ignore[attr-defined]
        assert [item.token_id for item in logprobs[1:] if item] == prompt[1:]
        assert received.outputs[0].num_cached_tokens == 0
    assert all(output.prompt_logprobs is None for output in received.outputs[1:])
