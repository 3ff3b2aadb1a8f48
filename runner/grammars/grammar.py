"""Structured output: what compiles grammars and says which tokens each logits row may have.

The model side sees only bitmasks: bit t of a line is set if token t is allowed, and a padded
vocabulary's extra ids never are. How grammars are compiled is behind `GrammarBackend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..messages import GrammarSpec

ALL_ALLOWED = -1  # an int32 with every bit set
TOO_SLOW = (
    "finding the tokens that may come next takes too long; an ambiguous grammar does that, "
    "in which the same text can be read in many ways"
)


class GrammarTooSlow(ValueError):
    """Masks of this grammar take longer than other requests can wait."""


class GrammarMatcher(Protocol):
    """Where one request stands in its grammar."""

    @property
    def is_terminated(self) -> bool:
        """Whether the grammar has been left through a stop token: nothing more may follow."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, without a change, if the grammar forbids it.

        Raises ValueError for an id that is none (-1 is a placeholder, not a token).
        """

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def fill(self, line: np.ndarray) -> None:
        """Write the mask of the next token into `line`, [ceil(V / 32)] int32."""


class GrammarBackend(ABC):
    """Compiles grammars."""

    @abstractmethod
    def prepare(self) -> None:
        """Begin with what the first grammar will need. Returns at once."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Future[GrammarMatcher]:
        """A matcher at the start of the grammar, later; the future raises ValueError if invalid."""

    def fill(self, jobs: Sequence[MaskJob]) -> None:
        """Fill the masks of a step; a fault of one grammar becomes the `error` of its job."""
        for job in jobs:
            try:
                job.num_cut = fill_rows(job.matcher, job.draft_ids, job.lines)
            except Exception as error:
                job.error = error

    @abstractmethod
    def shutdown(self) -> None:
        """Stop compiling."""


@dataclass(eq=False, slots=True)
class MaskJob:
    """The masks that one row of a step needs."""

    matcher: GrammarMatcher
    draft_ids: Sequence[int]
    lines: np.ndarray  # [drafts + 1, ceil(V / 32)] int32, to be filled
    num_cut: int = 0  # real drafts that the grammar forbids
    error: Exception | None = None


def fill_rows(matcher: GrammarMatcher, draft_ids: Sequence[int], lines: np.ndarray) -> int:
    """Fill one request's mask lines [drafts + 1, ceil(V / 32)]; the matcher ends where it began.

    Line j holds what may follow drafts 0 .. j-1. From the first draft that the grammar forbids, or
    that is none (-1), the drafts are cut: the line there masks it, so the sampler rejects it, and
    the lines behind, never reached, repeat it. Returns how many real drafts are cut.
    """
    num_filled, num_cut = fill_lines(matcher, draft_ids, lines)
    lines[num_filled:] = lines[num_filled - 1]
    return num_cut


def fill_lines(
    matcher: GrammarMatcher, draft_ids: Sequence[int], lines: np.ndarray
) -> tuple[int, int]:
    """As `fill_rows`, but only the lines up to the first cut: how many those are, and the cuts."""
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
    """Whether a mask line allows a token; an id that is none (-1) is never allowed."""
    in_range = 0 <= token_id < 32 * len(line)
    return in_range and bool(int(line[token_id // 32]) >> (token_id % 32) & 1)
