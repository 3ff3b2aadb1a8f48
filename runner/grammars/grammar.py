"""The interface of structured output: matchers, which know the allowed tokens.

The model runner sees only bitmasks: bit t of a line is set if token t is allowed. The extra ids of
a padded vocabulary are never allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..messages import SamplingParams

ALL_ALLOWED = -1  # an int32 with every bit set
TOO_SLOW = (
    "finding the allowed next tokens takes too long, probably because the grammar is ambiguous: "
    "it can read the same text in many ways"
)


class GrammarTooSlow(ValueError):
    """Filling this grammar's masks takes longer than other requests can wait."""


class GrammarMatcher(Protocol):
    """One request's position in its grammar."""

    @property
    def ends_with_text(self) -> bool:
        """True if the model has no stop token, so that the end of the text is the grammar's."""

    @property
    def is_terminated(self) -> bool:
        """True after a stop token has ended the grammar; no token may follow.

        If the matcher `ends_with_text`, it is true after a token that no other may follow."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token. If the grammar forbids it, change nothing and return False.

        Raises ValueError for an invalid token id, such as the placeholder -1.
        """

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""

    def fill(self, line: np.ndarray) -> None:
        """Write the mask of the next token into `line`, [ceil(V / 32)] int32."""


@dataclass(eq=False, slots=True)
class MaskJob:
    """The masks that one row of a step needs."""

    matcher: GrammarMatcher
    draft_ids: Sequence[int]
    lines: np.ndarray  # [drafts + 1, ceil(V / 32)] int32, written by `fill`
    num_cut: int = 0  # number of real drafts from the first one that the grammar forbids
    error: Exception | None = None


def fill_lines(
    matcher: GrammarMatcher, draft_ids: Sequence[int], lines: np.ndarray
) -> tuple[int, int]:
    """Fill one request's mask lines, [drafts + 1, ceil(V / 32)]; restore the matcher's position.

    Line j allows the tokens that may follow drafts 0 .. j-1. The drafts are cut at the first one
    that the grammar forbids or that is a placeholder (-1): the line at its position masks it, so
    the sampler rejects it, and later lines, which are never reached, are not filled. Returns how
    many lines it filled and how many real drafts are cut.
    """
    num_accepted = 0
    for index in range(len(lines)):
        matcher.fill(lines[index])
        if index >= len(draft_ids) or not is_allowed(lines[index], draft_ids[index]):
            break
        if not matcher.accept(draft_ids[index]):
            break
        num_accepted += 1
        if matcher.is_terminated:
            break  # the request ends with this draft
    if num_accepted:
        matcher.rollback(num_accepted)
    num_real = sum(draft_id >= 0 for draft_id in draft_ids)
    return index + 1, num_real - num_accepted


def is_allowed(line: np.ndarray, token_id: int) -> bool:
    """True if a mask line allows the token. An invalid id, such as -1, is never allowed."""
    in_range = 0 <= token_id < 32 * len(line)
    return in_range and bool(int(line[token_id // 32]) >> (token_id % 32) & 1)


def leaves_no_token(
    sampling: SamplingParams, line: np.ndarray | None, output: Sequence[int]
) -> bool:
    """Whether no token may follow the output tokens so far.

    line: [ceil(V / 32)] int32, the mask of the grammar; None without one. Without a grammar and
    allowed tokens this is False, because a server refuses bad words that cover a vocabulary.
    """
    allowed = sampling.allowed_token_ids
    if line is not None:
        bits = np.unpackbits(np.ascontiguousarray(line).view(np.uint8), bitorder="little")
        left = set(np.flatnonzero(bits).tolist())
        left = left if allowed is None else left.intersection(allowed)
    elif allowed is not None:
        left = set(allowed)
    else:
        return False
    if len(output) < sampling.min_tokens:
        unfinished = left.difference(sampling.stop_token_ids)
        if unfinished or line is None:  # a text that is complete may end early
            left = unfinished
    return left <= forbidden_by_words(sampling.bad_words_token_ids, output)


def forbidden_by_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """The last tokens of the words whose other tokens the output ends with."""
    return {
        word[-1]
        for word in words
        if word and (len(word) == 1 or list(output[1 - len(word) :]) == list(word[:-1]))
    }
