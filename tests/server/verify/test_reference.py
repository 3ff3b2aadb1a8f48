"""The distribution that the options define, from a list of the likeliest tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.runner.messages import SamplingParams, TokenLogprobs
from slipstream.server.verify.reference import TAIL, Distribution, distribution

P = {7: 0.4, 3: 0.3, 5: 0.2, 9: 0.06}  # of a model that has more tokens
WHOLE = {0: 0.5, 1: 0.3, 2: 0.2}


def at(
    law: dict[int, float], emitted: dict[int, int], vocab_size: int = 101, **options: Any
) -> Distribution | None:
    row = TokenLogprobs(7, math.log(0.4), 1, list(law), [math.log(p) for p in law.values()])
    return distribution(row, SamplingParams(0, 8, **options), emitted, 1e-3, vocab_size)


def test_without_options_the_unlisted_tokens_keep_their_mass() -> None:
    law = at(P, {})
    assert law is not None and not law.is_cut
    assert law.of == pytest.approx(P | {TAIL: 0.04})
    assert law.probability(9) == pytest.approx(0.06) and law.probability(1) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, {7: 4 / 7, 3: 3 / 7}),
        ({"top_k": 2, "temperature": 0.5}, {7: 16 / 25, 3: 9 / 25}),
        ({"top_p": 0.65}, {7: 4 / 7, 3: 3 / 7}),
        ({"min_p": 0.4}, {7: 4 / 9, 3: 3 / 9, 5: 2 / 9}),
        ({"min_p": 0.5, "temperature": 2.0, "top_k": 2}, {7: 0.535898, 3: 0.464102}),
        ({"logit_bias": {5: math.log(3)}, "top_k": 2}, {5: 0.6, 7: 0.4}),
        ({"allowed_token_ids": [3, 9]}, {3: 0.3 / 0.36, 9: 0.06 / 0.36}),
    ],
)
def test_what_the_options_cut_off_is_impossible(
    options: dict[str, Any], expected: dict[int, float]
) -> None:
    law = at(P, {}, **options)
    assert law is not None and law.is_cut
    assert law.of == pytest.approx(expected, rel=1e-5)
    assert law.probability(100) == 0.0


def test_penalties_count_the_emitted_tokens() -> None:
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "top_k": 2}
    law = at(P, {7: 2}, **options)
    weights = {7: 0.4 * math.exp(-1.0), 3: 0.3, 5: 0.2}
    assert law is not None
    assert law.of == pytest.approx({3: 0.6, 5: 0.4}) and weights[7] < 0.2


def test_with_the_whole_vocabulary_any_temperature_is_known() -> None:
    law = at(WHOLE, {}, vocab_size=3, temperature=2.0)
    whole = sum(math.sqrt(p) for p in WHOLE.values())
    assert law is not None and law.is_cut
    assert law.of == pytest.approx({t: math.sqrt(p) / whole for t, p in WHOLE.items()})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},  # the weight of the unlisted tokens is unknown
        {"top_p": 0.97},  # reaches beyond the list
        {"min_p": 0.01},  # so does this
        {"top_k": 2, "logit_bias": {1: 5.0}},  # an unlisted token
        {"top_k": 2, "allowed_token_ids": [1, 7]},
        {"top_k": 2, "repetition_penalty": 1.2},  # depends on logits
        {"top_p": 0.7},  # exactly at a cut-off, where rounding decides
        {"min_p": 0.5},
        {"top_k": 1, "logit_bias": {3: math.log(4 / 3)}},
    ],
)
def test_where_the_list_does_not_decide_there_is_no_answer(options: dict[str, Any]) -> None:
    assert at(P, {}, **options) is None


def test_a_penalty_on_an_unlisted_token_matters_only_if_it_can_be_sampled() -> None:
    assert at(P, {1: 1}, presence_penalty=0.5) is None
    law = at(P, {1: 1}, presence_penalty=0.5, top_k=2)
    assert law is not None and law.of == pytest.approx({7: 4 / 7, 3: 3 / 7})
    assert at(P, {1: 1}, presence_penalty=-0.5, top_k=2) is None
