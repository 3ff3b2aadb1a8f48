"""The tokens of a reply as a server elsewhere describes them, in any of the formats in use."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from ..endpoint import TOP, Endpoint, RequestFailed
from ..greedy import first_difference

_WORDS = re.compile(r"\s*\S+|\s+$")
_LEAST_ROW = 2  # log probabilities that tell a gap


@dataclass(frozen=True)
class Tokens:
    """A reply, token by token; a server without log probabilities tells only its words."""

    texts: list[str]
    logprobs: list[float]
    top: list[dict[str, float]]  # the likeliest tokens at each position; empty: not reported
    ends: bool = False  # whether the model ended the reply

    @classmethod
    def of(cls, choice: dict[str, Any]) -> Tokens:
        found = choice.get("logprobs") or {}
        if rows := found.get("content"):  # as chats report them, also for completions of llama.cpp
            found = {
                "tokens": [row["token"] for row in rows],
                "token_logprobs": [row["logprob"] for row in rows],
                "top_logprobs": [
                    {top["token"]: top["logprob"] for top in row.get("top_logprobs") or ()}
                    for row in rows
                ],
            }
        texts, logprobs, top = (
            list(found.get(key) or ()) for key in ("tokens", "token_logprobs", "top_logprobs")
        )
        if not texts or len(texts) != len(logprobs):
            texts = _WORDS.findall(str(choice.get("text") or ""))
            logprobs, top = [math.nan] * len(texts), []
        top += [None] * (len(texts) - len(top))
        ends = choice.get("finish_reason") == "stop"
        return cls(texts, logprobs, [dict(row or {}) for row in top], ends)

    @property
    def words(self) -> Tokens:
        """The same reply, as a server without log probabilities tells it."""
        return Tokens.of({"text": "".join(self.texts)})

    @property
    def is_complete(self) -> bool:
        """Whether the likeliest tokens are known at every position."""
        return all(len(row) >= _LEAST_ROW for row in self.top)


def gap(ours: Tokens, theirs: Tokens, at: int) -> float | None:
    """By how many nats the token of `ours` is less likely than that of `theirs` at position `at`.

    The likeliest tokens are those of `theirs`; infinity if the token is not among them, and None
    if they are unknown. Where one of the replies ends, the token that ends it has no text: then the
    gap is at least that of the two likeliest tokens."""
    row = theirs.top[at] if at < len(theirs.top) else {}
    if len(row) < _LEAST_ROW:
        return None
    first, second, *_ = sorted(row.values(), reverse=True)
    if at >= len(ours.texts) or at >= len(theirs.texts):
        return first - second
    chosen = row.get(ours.texts[at])
    return math.inf if chosen is None else max(0.0, row.get(theirs.texts[at], first) - chosen)


async def ask_again(side: Endpoint, prompt: str, ours: Tokens, theirs: Tokens) -> Tokens:
    """`theirs` with the likeliest tokens at the first difference, if they were not reported.

    llama.cpp reports none for accepted drafts, and no server does for the token that ends a reply.
    The first token of a request is no draft, so the text up to there is continued by one token.
    """
    at = first_difference(ours.texts, theirs.texts)
    if at is None or gap(ours, theirs, at) is not None or side.is_chat or not side.has_logprobs:
        return theirs
    text = prompt + "".join(theirs.texts[:at])
    try:
        reply = await side.complete(text, max_tokens=1, temperature=0, logprobs=TOP)
    except RequestFailed:
        return theirs
    row = next(iter(Tokens.of(reply["choices"][0]).top), {})
    return replace(theirs, top=[*theirs.top[:at], row, *theirs.top[at + 1 :]])
