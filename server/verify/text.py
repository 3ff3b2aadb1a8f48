"""Checks of what clients see, by requests to an OpenAI-compatible server: stop strings and usage.

The server is the application in this process, or one at a URL. Greedy replies are compared with
themselves: a request with a stop string must end where the text without it has that string first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .endpoint import Endpoint, RequestFailed
from .report import Report

GROUP = "Text"
_MOST_STOPS = 3  # stop strings tried for each prompt


async def check_text(
    on: Endpoint,
    off: Endpoint,
    prompts: Sequence[str | Sequence[int]],
    max_tokens: int,
    report: Report,
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Check that stop strings end replies of `on` where the text of `off` has them, and usage.

    `off` is the same server without drafts, or the same server where that cannot be asked for.
    """
    stops = wrong = 0
    faults: list[str] = []
    has_usage = False
    try:
        for prompt in prompts:
            whole, plain = [
                await side.complete(prompt, max_tokens=max_tokens, temperature=0)
                for side in (on, off)
            ]
            has_usage |= any(reply.get("usage") for reply in (whole, plain))
            faults += filter(None, (_miscounted(reply, max_tokens) for reply in (whole, plain)))
            if _text(whole) == _text(plain) and _counts(whole) != _counts(plain):
                faults.append("equal replies have different usage with and without drafts")
            for stop in _stop_strings(_text(plain)):
                cut = await on.complete(prompt, max_tokens=max_tokens, temperature=0, stop=[stop])
                stops += 1
                expected = _text(plain)[: _text(plain).index(stop)]
                reason = cut["choices"][0].get("finish_reason")
                counted = _count(cut) <= _count(plain)
                wrong += not (_text(cut) == expected and reason == "stop" and counted)
            tick()
    except RequestFailed as error:
        report.add(GROUP, "requests", False, str(error))
        return
    if stops:
        # A near-tie may change the text before the stop string: one in ten is no fault.
        report.add(
            GROUP, "stop strings", wrong <= stops // 10,
            f"{stops - wrong} of {stops} replies end exactly before the stop string",
            stops=stops, wrong=wrong,
        )  # fmt: skip
    else:
        report.skip(GROUP, "stop strings", "the replies are too short to have any")
    if not has_usage:
        report.skip(GROUP, "usage", "the server reports none")
        return
    text = faults[0] if faults else f"the usage of {2 * len(prompts)} replies is right"
    report.add(GROUP, "usage", not faults, text, faults=faults)


def _text(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["text"])


def _counts(reply: dict[str, Any]) -> list[Any]:
    """The counts of tokens in the usage, without those of cached ones, which may differ."""
    usage = reply.get("usage") or {}
    return [usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total")]


def _count(reply: dict[str, Any]) -> int:
    return int((reply.get("usage") or {}).get("completion_tokens", 0))


def _stop_strings(text: str) -> list[str]:
    """Pieces of the text that span word boundaries, so that they begin and end within tokens."""
    length = len(text)
    places = (length // 4, length // 2, 3 * length // 4)
    return [text[at : at + 4] for at in places if at + 4 <= length][:_MOST_STOPS]


def _miscounted(reply: dict[str, Any], max_tokens: int) -> str:
    """What is wrong with a reply's usage, or nothing."""
    usage = reply.get("usage")
    if not usage:
        return "a reply has no usage"
    prompt, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    if usage.get("total_tokens") != prompt + made:
        return f"total_tokens is {usage.get('total_tokens')}, the sum is {prompt + made}"
    reason = reply["choices"][0].get("finish_reason")
    if reason == "length" and made != max_tokens:
        return f"a reply that ended by its length of {max_tokens} counts {made} tokens"
    ids = reply["choices"][0].get("token_ids")
    if ids is not None and len(ids) != made:
        return f"a reply of {len(ids)} tokens counts {made}"
    if not 1 <= made <= max_tokens:
        return f"a reply of at most {max_tokens} tokens counts {made}"
    return ""
