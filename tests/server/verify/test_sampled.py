"""What a report says of sampled text where probabilities are not known."""

from __future__ import annotations

import math

from slipstream.runner.messages import SamplingParams, TokenLogprobs
from slipstream.server.verify import sampled as sampled_module
from slipstream.server.verify.replies import Reply
from slipstream.server.verify.report import Report
from slipstream.server.verify.rounding import Rounding
from slipstream.server.verify.sampled import Known, Sampled, SampledOption, two_samples

LEVEL = 1e-5
VOCABULARY = 1000


def judged(logprobs: list[float], count: int) -> Report:
    """The report on top-k for a model whose likeliest tokens have these log probabilities."""
    options = SamplingParams(0, 1, temperature=0.8, top_k=2)
    top = list(range(len(logprobs)))
    at = TokenLogprobs(0, logprobs[0], 1, top, logprobs)
    known = Known(VOCABULARY)
    replies = [Reply([1], [0], []) for _ in range(count)]
    rounding = Rounding(near_tie=0.05, mean=0.0)
    for index, reply in enumerate(replies):
        known.add(index, reply, [at], options, True, rounding)
    found = Sampled(SampledOption("top-k", options), known, 0, replies, list(replies))
    found.samples = two_samples(replies, replies, LEVEL, 0.0)
    report = Report({})
    sampled_module._judge(found, LEVEL, report)
    sampled_module._judge_together([found], LEVEL, report)
    return report


def test_a_flat_model_is_not_shown_to_be_right_and_a_peaked_one_is() -> None:
    flat = judged([math.log(1 / VOCABULARY)] * 8, 500)
    (option, *together) = flat.checks
    assert option.status == "note" and flat.passes
    assert "not shown against known probabilities" in option.summary
    assert "none of 500 positions" in option.summary and "rounding of a tie" in option.summary
    assert "total variation" in option.summary  # the other half is shown
    assert [check.status for check in together] == ["skip"] * 3
    assert [check.summary for check in together] == [
        "no draft was judged", "no probability was known", "no probability was known"
    ]  # fmt: skip
    peaked = judged([math.log(p) for p in (0.6, 0.3, 0.05, 0.01)], 500)
    assert peaked.checks[0].status == "fail"  # only the likeliest token was ever emitted
    certain = judged([math.log(p) for p in (0.999, 0.0005, 0.0001, 0.00001)], 500)
    assert certain.checks[0].status == "pass" and "would show a bias" in certain.checks[0].summary


def test_too_few_tokens_show_nothing() -> None:
    report = judged([math.log(p) for p in (0.999, 0.0005, 0.0001)], 2)
    assert report.checks[0].status == "note"
    assert "2 tokens are too few to show any bias" in report.checks[0].summary
