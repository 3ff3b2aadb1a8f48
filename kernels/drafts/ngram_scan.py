"""Prompt lookup: finds an earlier occurrence of a request's last tokens and proposes what followed.

The longest match wins, and among equal ones the most recent, which fits the text's current topic
better than the first. The copy may continue into its own output, as in LZ77, so that a loop of any
period is drafted in full. A *prediction*, the output that the client expects, is searched as well:
there, among equal matches, the one nearest to the output's length wins, and the start of the output
matches the start of the prediction.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..operation import operation
from .haystack import OUTSIDE, Haystack, Predictions

__all__ = ["Haystack", "Predictions", "ngram_scan", "ngram_scan_cpu", "ngram_scan_reference"]


def ngram_scan_reference(
    haystack: Haystack,
    slots: Tensor,
    lengths: Tensor,
    min_n: int,
    max_n: int,
    num_drafts: int,
) -> Tensor:
    """Find where a request's last tokens occurred before, and propose the tokens that followed.

    The longest match counts, of `min_n` to `max_n` tokens. `haystack` has the tokens to search.
    slots: [N] int64, batch row -> slot; lengths: [N] int32, known tokens, 0 = propose nothing.
    Returns [N, num_drafts] int64, -1 = no draft.
    """
    # Shapes are fixed, and nothing waits for the device.
    tokens = haystack.token_ids[slots].long()  # [N, S]
    length = lengths.long()[:, None]  # [N, 1]
    back = torch.arange(1, max_n + 1, device=slots.device)  # [max_n]
    steps = torch.arange(num_drafts, device=slots.device)  # [K]
    suffix = tokens.gather(1, (length - back).clamp(min=0))  # [N, max_n], newest first
    suffix = torch.where(back <= length, suffix, OUTSIDE)

    ends = torch.arange(tokens.shape[1], device=slots.device)  # index after a match's last token
    matched = torch.where(ends < length, _match_lengths(tokens, suffix, -1), 0)  # [N, S]
    end = (matched * tokens.shape[1] + ends).argmax(1, keepdim=True)  # [N, 1]
    best = matched.gather(1, end)
    period = (length - end).clamp(min=1)
    drafts = tokens.gather(1, end + steps % period)

    if (texts := haystack.predictions) is not None:
        places = texts.start[slots][:, None] + torch.arange(texts.longest, device=slots.device)
        predicted = texts.token_ids[places.clamp(max=texts.token_ids.shape[0] - 1)].long()  # [N, P]
        output_len = length - haystack.prompt_len[slots].long()[:, None]
        suffix = torch.where(back <= output_len, suffix, OUTSIDE)
        ends = torch.arange(predicted.shape[1], device=slots.device)
        size = texts.length[slots][:, None]
        matched = torch.where(ends < size, _match_lengths(predicted, suffix, OUTSIDE), 0)
        span = predicted.shape[1] + tokens.shape[1]
        end = (matched * span - (ends - output_len).abs()).argmax(1, keepdim=True)
        in_prediction = matched.gather(1, end)
        at = end + steps
        continuation = predicted.gather(1, at.clamp(max=predicted.shape[1] - 1))
        continuation = torch.where(at < size, continuation, -1)
        preferred = in_prediction >= torch.clamp(best, min=min_n)
        drafts = torch.where(preferred, continuation, drafts)
        best = torch.maximum(best, in_prediction)
    return torch.where((best >= min_n) & (length > 0), drafts, -1)


ngram_scan = operation(ngram_scan_reference, "slots", ".triton.ngram_scan")


def _match_lengths(text: Tensor, suffix: Tensor, outside: int) -> Tensor:
    """Count the tokens before each index that match the suffix: [N, S], 0 .. max_n.

    text: [N, S]; suffix: [N, max_n], newest first; outside: the token id assumed before index 0.
    """
    lengths = torch.zeros_like(text)
    alive = torch.ones_like(text, dtype=torch.bool)
    shifted = text
    for n in range(suffix.shape[1]):
        shifted = torch.nn.functional.pad(shifted, (1, 0), value=outside)[:, : text.shape[1]]
        alive &= shifted == suffix[:, n : n + 1]
        lengths += alive
    return lengths


def ngram_scan_cpu(
    haystack: Haystack,
    slots: Tensor,
    lengths: Tensor,
    min_n: int,
    max_n: int,
    num_drafts: int,
) -> Tensor:
    """The CPU version of `ngram_scan`: row by row, checking only places that still match."""
    drafts = np.full((slots.shape[0], num_drafts), -1, dtype=np.int64)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        tokens = haystack.token_ids[slot, :length].numpy()
        best, ends = _longest_matches(tokens, tokens[: -max_n - 1 : -1], 0)
        source, start = tokens, int(ends[-1]) if best >= min_n else length
        indices = start + np.arange(num_drafts) % max(length - start, 1)
        texts = haystack.predictions
        size = 0 if texts is None else int(texts.length[slot])
        if size and texts is not None:
            prompt_len = int(haystack.prompt_len[slot])
            text = np.full(max_n + size, OUTSIDE, dtype=np.int32)
            first = int(texts.start[slot])
            text[max_n:] = texts.token_ids[first : first + size].numpy()
            suffix = np.full(max_n, OUTSIDE, dtype=np.int32)
            output = tokens[prompt_len:][: -max_n - 1 : -1]
            suffix[: output.shape[0]] = output
            matched, ends = _longest_matches(text, suffix, max_n)
            if matched >= max(best, min_n):
                expected = max_n + length - prompt_len
                start = int(ends[np.abs(ends - expected).argmin()])
                best, source, indices = matched, text, start + np.arange(num_drafts)
        if best >= min_n:
            indices = indices[indices < source.shape[0]]
            drafts[row, : indices.shape[0]] = source[indices]
    return torch.from_numpy(drafts)


def _longest_matches(text: np.ndarray, suffix: np.ndarray, first: int) -> tuple[int, np.ndarray]:
    """Find the longest match of the suffix: (its length, the ascending indices after each one).

    suffix: newest token first. Only indices in [max(first, 1), len(text)) count, since a token must
    follow the match.
    """
    start = max(first, 1)
    ends = np.flatnonzero(text[start - 1 : -1] == suffix[0]) + start
    if not ends.size:
        return 0, ends
    best = 1
    for n in range(1, suffix.shape[0]):
        longer = ends[np.searchsorted(ends, n + 1) :]  # with at least n + 1 tokens before them
        longer = longer[text[longer - n - 1] == suffix[n]]
        if not longer.size:
            break
        best, ends = n + 1, longer
    return best, ends
