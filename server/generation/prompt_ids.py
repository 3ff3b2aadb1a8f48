"""Tokenizes texts into prompts that fit the model; long texts are tokenized off the event loop.

A prompt that is too long is truncated if the request allows it, else refused. A text that cannot
fit is refused after only a part of it was tokenized. This module does not know the endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..chat_templates.content_guard import RenderedChat
from ..errors import ContextLengthExceeded, InvalidRequest
from ..off_loop import off_loop
from ..text.tokenizer import TooManyTokens
from .services import Services

_LONG_TEXT = 4096  # characters; shorter texts are tokenized on the event loop
_VERY_LONG_TEXT = 65536  # characters; longer texts get the pool for long work


@dataclass(frozen=True)
class Fit:
    """The limits that a prompt must fit, and how the request wants it truncated."""

    limit: int  # maximum number of tokens, prompt and output together
    param: str  # request parameter that holds the prompt
    keep: int | None = None  # keep only the last tokens; -1: as many as fit; None: all
    wanted: int | None = None  # output tokens requested; None: not specified

    @property
    def last(self) -> int | None:
        """An upper bound on the number of last tokens that are kept; None if all are."""
        if self.keep is None:
            return None
        return self.limit if self.keep < 0 else min(max(self.keep, 1), self.limit)

    @property
    def output(self) -> int:
        """The number of tokens that must be left for the output."""
        return 1 if self.wanted is None else self.wanted

    def exceeded(self, count: int, is_exact: bool = True) -> ContextLengthExceeded:
        """The error for a prompt of `count` tokens."""
        return ContextLengthExceeded(self.limit, count, self.output, self.param, exact=is_exact)


async def tokenize(
    services: Services, texts: Sequence[str], add_special_tokens: bool, fit: Fit
) -> list[list[int]]:
    """The token ids of each text. Raises ContextLengthExceeded if a text exceeds the limit.

    If only the last tokens are kept, only the end of a long text is tokenized (see `truncated`).
    """
    encode = services.tokenizer.encode_batch
    arguments = (texts, add_special_tokens, fit.limit, fit.last)
    size = sum(map(len, texts))
    try:
        if size <= _LONG_TEXT:
            return encode(*arguments)
        if size <= _VERY_LONG_TEXT:
            return await asyncio.to_thread(encode, *arguments)
        return await off_loop(encode, *arguments)
    except TooManyTokens as error:
        raise fit.exceeded(error.count, error.is_exact) from None


async def tokenize_chat(
    services: Services, prompt: RenderedChat, add_special_tokens: bool, fit: Fit
) -> list[int]:
    """The token ids of a rendered chat. Raises ContextLengthExceeded as `tokenize` does."""
    if prompt.parts is None:
        (ids,) = await tokenize(services, [prompt.text], add_special_tokens, fit)
        return ids
    tokenizer = services.tokenizer
    try:
        return await off_loop(
            tokenizer.encode_parts, prompt.parts, add_special_tokens, fit.limit, fit.last
        )
    except TooManyTokens as error:
        raise fit.exceeded(error.count, error.is_exact) from None


def truncated(ids: list[int], fit: Fit) -> list[int]:
    """The last `fit.keep` ids, or all if it is None.

    -1 keeps as many as leave room for the requested output, or for one token by default.
    """
    if fit.keep is None:
        return ids
    if fit.keep == 0 or fit.keep >= fit.limit:
        raise InvalidRequest(
            "Invalid value for 'truncate_prompt_tokens': "
            f"expected -1 or a number from 1 to {fit.limit - 1}.",
            "truncate_prompt_tokens",
            "invalid_value",
        )
    return ids[-fit.keep :] if fit.keep > 0 else ids[-max(fit.limit - (fit.wanted or 1), 1) :]


def room(prompt: Sequence[int], fit: Fit, default: int | None = None) -> int:
    """The maximum number of tokens to generate. Raises ContextLengthExceeded if they do not fit.

    A request that does not specify a number gets as many as fit, at most `default`.
    """
    if not prompt:
        raise InvalidRequest("The prompt is empty.", fit.param, "invalid_value")
    if len(prompt) + fit.output > fit.limit:
        raise fit.exceeded(len(prompt))
    if fit.wanted is not None:
        return fit.wanted
    fits = fit.limit - len(prompt)
    return fits if default is None else min(fits, default)
