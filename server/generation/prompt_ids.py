"""From texts to prompts of token ids that fit the model: encodes off the event loop, cuts, refuses.

It must not know endpoints. A text that cannot fit is refused after a part of it was encoded.
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
_VERY_LONG_TEXT = 65536  # longer ones do not delay what others encode


@dataclass(frozen=True)
class Fit:
    """What a prompt has to fit in."""

    limit: int  # tokens of prompt and output
    param: str  # where the client gave the prompt
    keep: int | None = None  # the last tokens alone; -1: as many as fit with the output
    wanted: int | None = None  # tokens of output that the client named

    @property
    def last(self) -> int | None:
        """As many of the last tokens are needed; None for all."""
        if self.keep is None:
            return None
        return self.limit if self.keep < 0 else min(max(self.keep, 1), self.limit)

    @property
    def output(self) -> int:
        """Tokens that must be left for the output."""
        return 1 if self.wanted is None else self.wanted

    def exceeded(self, count: int, is_exact: bool = True) -> ContextLengthExceeded:
        """The error for a prompt of `count` tokens."""
        return ContextLengthExceeded(self.limit, count, self.output, self.param, exact=is_exact)


async def tokenize(
    services: Services, texts: Sequence[str], add_special_tokens: bool, fit: Fit
) -> list[list[int]]:
    """The ids of each text. ContextLengthExceeded if one has more tokens than the limit.

    To be cut to the last tokens, only the end of a long text is encoded (see `truncated`).
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
    """The ids of a rendered chat."""
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
    """The last `keep` ids; -1 keeps as many as fit with the output, one token if none is named."""
    if fit.keep is None:
        return ids
    if fit.keep == 0 or fit.keep >= fit.limit:
        raise InvalidRequest(
            f"Invalid value for 'truncate_prompt_tokens': expected -1 or 1 … {fit.limit - 1}.",
            "truncate_prompt_tokens",
            "invalid_value",
        )
    return ids[-fit.keep :] if fit.keep > 0 else ids[-max(fit.limit - (fit.wanted or 1), 1) :]


def room(prompt: Sequence[int], fit: Fit, default: int | None = None) -> int:
    """How many tokens may be generated; ContextLengthExceeded if those wanted do not fit.

    A request that names no number gets what fits, but at most `default`.
    """
    if not prompt:
        raise InvalidRequest("The prompt is empty.", fit.param, "invalid_value")
    if len(prompt) + fit.output > fit.limit:
        raise fit.exceeded(len(prompt))
    if fit.wanted is not None:
        return fit.wanted
    fits = fit.limit - len(prompt)
    return fits if default is None else min(fits, default)
