"""Outputs that arrive together make the same text, tokens and end as outputs one by one."""

from __future__ import annotations

import pytest

from slipstream.runner.messages import RequestOutput
from slipstream.server.text.choice_text import ChoiceText, GenerationEvent, TextOptions

from ..api_fakes import TOKENIZER, logprobs_of

IDS = TOKENIZER.encode("Hello 🎉 stop, then more.", False)


def outputs(with_logprobs: bool) -> list[RequestOutput]:
    made = []
    for start in range(0, len(IDS), 2):
        ids = IDS[start : start + 2]
        made.append(RequestOutput("r", ids, num_draft_tokens=1, num_accepted_tokens=1))
        if with_logprobs:
            made[-1].logprobs = logprobs_of(ids, 1)
    made[0].num_cached_tokens = 3
    made[-1].finish_reason = "length"
    return made


def fed(size: int, stop: list[str], with_logprobs: bool) -> tuple[GenerationEvent, ChoiceText]:
    """All events of the outputs, read in batches of `size`, joined."""
    choice = ChoiceText(0, TOKENIZER, TextOptions(stop))
    whole = GenerationEvent(0, "", [])
    left = outputs(with_logprobs)
    while left and whole.finish_reason is None:
        whole.join(choice.feed(left[:size]))
        left = left[size:]
    return whole, choice


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [([], "Hello 🎉 stop, then more."), (["stop"], "Hello 🎉 ")]
)
@pytest.mark.parametrize("size", [2, 3, 100])
def test_outputs_read_together_equal_outputs_read_one_by_one(
    size: int, stop: list[str], text: str, with_logprobs: bool
) -> None:
    whole, choice = fed(size, stop, with_logprobs)
    single, alone = fed(1, stop, with_logprobs)
    assert whole.text == single.text == text
    assert whole.token_ids == single.token_ids and list(whole.logprobs) == list(single.logprobs)
    assert whole.finish_reason == single.finish_reason == ("stop" if stop else "length")
    assert whole.num_read == single.num_read >= len(whole.token_ids)
    assert choice.num_tokens == alone.num_tokens == len(whole.token_ids)
    assert choice.num_cached_tokens == 3 and choice.spec_steps == alone.spec_steps


def test_prompt_logprobs_of_the_first_output_reach_the_event() -> None:
    choice = ChoiceText(0, TOKENIZER, TextOptions([]))
    first, second = outputs(with_logprobs=False)[:2]
    first.prompt_logprobs = [b"packed"]
    assert choice.feed([first, second]).prompt_logprobs == [b"packed"]
    assert choice.feed([second]).prompt_logprobs is None
