"""Whether options leave a token: the host's answer is the sampler's, and the client is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampler_harness import Table, rows_of

from slipstream.runner.grammars.grammar import leaves_no_token
from slipstream.runner.messages import SamplingParams
from slipstream.runner.sampling.logits_processing import process_logits

from ..schedule_bench import Bench, add

V = 6
TOKENS = st.integers(0, V - 1)
SOME = st.lists(TOKENS, min_size=1, max_size=4, unique=True)
OUTPUT = st.lists(TOKENS, max_size=3)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=5)


@given(st.none() | SOME, WORDS, st.integers(0, 4), SOME, st.none() | SOME, OUTPUT, OUTPUT)
def test_the_host_finds_what_the_sampler_forbids(
    allowed: list[int] | None,
    words: list[list[int]],
    min_tokens: int,
    stops: list[int],
    by_grammar: list[int] | None,
    output: list[int],
    drafts: list[int],
) -> None:
    params = SamplingParams(
        seed=0,
        max_tokens=9,
        allowed_token_ids=allowed,
        bad_words_token_ids=words,
        min_tokens=min_tokens,
        stop_token_ids=stops,
    )
    line = None if by_grammar is None else np.array([sum(1 << t for t in by_grammar)], np.int32)
    table = Table.of([(params, [1, 2], output)], V)
    rows = rows_of(table, [0], [drafts], max(len(drafts), 1))
    mask = None if line is None else torch.from_numpy(line).expand(len(drafts) + 1, 1).contiguous()
    logits = torch.zeros(len(drafts) + 1, V)
    done = process_logits(logits, rows, table, mask, table.sampling.features([0]))
    for index, is_dead in enumerate((done.amax(-1) == float("-inf")).tolist()):
        found = leaves_no_token(params, line, [*output, *drafts[:index]])
        if line is None and allowed is None:  # the server has refused words for all tokens
            assert not found
        else:
            assert found is is_dead


@pytest.mark.parametrize(
    ("options", "is_dead_end"),
    [
        ({"allowed_token_ids": [3, 4], "bad_words_token_ids": [[3], [4]]}, True),
        ({"allowed_token_ids": [3], "min_tokens": 2, "stop_token_ids": [3]}, True),
        ({"allowed_token_ids": [3, 4], "bad_words_token_ids": [[3]]}, False),  # so it was NaN
        ({}, False),
    ],
)
def test_a_dead_end_is_the_requests_fault_and_nan_is_not(
    options: dict[str, object], is_dead_end: bool
) -> None:
    bench = Bench()
    good = add("good", [4, 5, 6], stop_token_ids=[])
    bench.engine.handle([add("bad", [1, 2, 3], **options), good])
    bench.runner.nan_slots.add(0)  # what the sampler reports in both cases
    bench.run()
    (output,) = bench.received["bad"].outputs
    assert output.finish_reason == "error" and output.invalid_request is is_dead_end
    word = "leave no token to choose after 0 tokens" if is_dead_end else "NaN"
    assert word in (output.error or "")
    bench.expect(good)
