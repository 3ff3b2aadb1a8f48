"""Whether a request's options, with its grammar's mask, leave any token to choose.

The sampler only reports a row in which nothing is left, or whose logits were NaN. This tells which:
the first is the client's fault. It repeats on the host what `sampling.logits_processing` forbids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..messages import SamplingParams


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
