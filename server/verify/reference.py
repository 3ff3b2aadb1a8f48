"""Computes the distribution that the sampling options define, from log probabilities alone.

An independent statement of what `runner.sampling` does, in plain Python. A server reports only the
likeliest tokens, so the distribution is known exactly only where the options cut off all others;
elsewhere the answer is None, and the position is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...runner.messages import SamplingParams, TokenLogprobs

TAIL = -1  # stands for all tokens that are not listed


@dataclass(frozen=True)
class Distribution:
    """Probabilities of the tokens that can be sampled at one position."""

    of: dict[int, float]  # token -> probability; TAIL -> that of all unlisted tokens
    is_cut: bool  # whether tokens outside `of` are impossible

    def probability(self, token: int) -> float | None:
        """The token's probability; None if it is one of the unlisted ones."""
        if token in self.of or self.is_cut:
            return self.of.get(token, 0.0)
        return None


def distribution(
    at: TokenLogprobs,
    options: SamplingParams,
    emitted: Mapping[int, int],
    margin: float,
    vocab_size: int,
) -> Distribution | None:
    """The distribution at a position with these log probabilities of the model.

    `emitted` counts the reply's tokens before it. None if the list does not determine it, or if a
    token is within `margin` nats of a cut-off, where rounding decides on which side it is. Supports
    temperature, top-k, top-p, min-p, presence and frequency penalties, bias and allowed tokens;
    not repetition penalties, which depend on logits.
    """
    logits = dict(zip(at.top_ids, at.top_logprobs, strict=True))
    rest = max(0.0, 1 - math.fsum(map(math.exp, logits.values())))
    is_whole = len(logits) >= vocab_size
    ceiling = -math.inf if is_whole else at.top_logprobs[-1]  # no unlisted token is above it
    if options.repetition_penalty != 1:
        return None
    lowered = _adjust(logits, options, emitted)  # unlisted tokens that are now less likely
    if lowered is None:
        return None
    scaled = {token: value / options.temperature for token, value in logits.items()}
    ceiling /= options.temperature
    kept = sorted(scaled.items(), key=lambda item: -item[1])
    is_cut = is_whole or options.allowed_token_ids is not None
    if options.min_p and (cut := kept[0][1] + math.log(options.min_p)) > ceiling + margin:
        if any(abs(value - cut) < margin for _, value in kept):
            return None
        kept, is_cut = [(t, v) for t, v in kept if v > cut], True
    elif options.min_p and not is_cut:
        return None
    if 0 < options.top_k < len(kept):
        last, following = kept[options.top_k - 1][1], kept[options.top_k][1]
        if last - max(following, ceiling) < margin:
            return None
        kept, is_cut = kept[: options.top_k], True
    if not is_cut and (options.temperature != 1 or lowered):
        return None  # the weight of the unlisted tokens is unknown
    weights = {token: math.exp(value) for token, value in kept}
    if not is_cut:
        weights[TAIL] = rest
    whole = math.fsum(weights.values())
    law = {token: weight / whole for token, weight in weights.items()}
    return Distribution(law, is_cut) if options.top_p >= 1 else _nucleus(law, options.top_p, margin)


def _adjust(
    logits: dict[int, float], options: SamplingParams, emitted: Mapping[int, int]
) -> set[int] | None:
    """Apply bias, allowed tokens and penalties in place.

    Returns the unlisted tokens that became less likely, which matters only if they can be sampled;
    None if one became more likely, or has to be known.
    """
    changes = dict(options.logit_bias)
    if options.presence_penalty or options.frequency_penalty:
        for token, count in emitted.items():
            penalty = options.presence_penalty + options.frequency_penalty * count
            changes[token] = changes.get(token, 0.0) - penalty
    unlisted = changes.keys() - logits.keys()
    if any(changes[token] > 0 for token in unlisted):
        return None
    for token in changes.keys() - unlisted:
        logits[token] += changes[token]
    if options.allowed_token_ids is not None:
        if not logits.keys() >= set(options.allowed_token_ids):
            return None
        for token in logits.keys() - set(options.allowed_token_ids):
            del logits[token]
    return unlisted


def _nucleus(law: dict[int, float], top_p: float, margin: float) -> Distribution | None:
    """The likeliest tokens that together reach `top_p`; None if they are not all listed."""
    ordered = sorted((p, token) for token, p in law.items() if token != TAIL)
    kept: dict[int, float] = {}
    reached = 0.0
    while ordered and reached < top_p:
        p, token = ordered.pop()
        kept[token] = p
        reached += p
    tie = ordered and ordered[-1][0] > p * math.exp(-margin)
    if reached < top_p or tie or min(reached - top_p, top_p - reached + p) < margin * top_p:
        return None
    return Distribution({token: p / reached for token, p in kept.items()}, True)
