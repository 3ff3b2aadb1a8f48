"""Triton version of `kernels.drafts.ngram_scan`: one program and one pass over tokens per row."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..haystack import OUTSIDE, Haystack

BLOCK = 1024  # positions compared at once

_OUTSIDE = tl.constexpr(OUTSIDE)


@triton.jit
def _matched(text, size, end, tokens, length, output_len, outside, MAX_N: tl.constexpr):
    """Count the tokens before each `end` in `text` that match the newest tokens: [BLOCK] int32.

    Tokens older than the newest `output_len` have the id `_OUTSIDE`, and positions before the text
    the id `outside`. From `size` on there may be no memory: nothing there is read or matches.
    """
    count = tl.zeros_like(end)
    alive = end < size
    for n in tl.static_range(MAX_N):
        wanted = tl.load(tokens + length - 1 - n, mask=n < output_len, other=_OUTSIDE)
        there = tl.load(text + end - 1 - n, mask=alive & (end > n), other=0)
        there = tl.where(end > n, there, outside)
        alive = alive & (there == wanted)
        count += alive.to(tl.int32)
    return count


@triton.jit(do_not_specialize=["num_drafts"])
def _scan_kernel(
    token_ids,  # [R, S] int32
    prompt_len,  # [R] int32
    prediction_ids,  # [T] int32
    prediction_start,  # [R] int64
    prediction_len,  # [R] int64
    slots,  # [N] int64
    lengths,  # [N] int32
    drafts,  # [N, K] int64
    stride,
    min_n,
    num_drafts,
    MAX_N: tl.constexpr,
    HAS_PREDICTION: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    length = tl.load(lengths + row)
    tokens = token_ids + slot * stride
    best = tl.full([], 0, tl.int32)
    end = tl.full([], 0, tl.int32)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        count = _matched(tokens, length, place, tokens, length, length, -1, MAX_N)
        here = tl.max(count, axis=0)
        latest = tl.max(tl.where(count == here, place, 0), axis=0)
        better = (here > 0) & (here >= best)  # of equal matches the most recent
        end = tl.where(better, latest, end)
        best = tl.maximum(best, here)
    step = tl.arange(0, K)
    source = end + step % tl.maximum(length - end, 1)
    found = (best >= min_n) & (length > 0)
    out = tl.load(tokens + source, mask=found & (step < num_drafts), other=-1)

    if HAS_PREDICTION:
        size = tl.load(prediction_len + slot).to(tl.int32)
        size = tl.where(length > 0, size, 0)
        text = prediction_ids + tl.load(prediction_start + slot)
        output_len = length - tl.load(prompt_len + slot)
        most = tl.full([], 0, tl.int32)
        at = tl.full([], 0, tl.int32)
        distance = tl.full([], 2147483647, tl.int32)
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            count = _matched(text, size, place, tokens, length, output_len, _OUTSIDE, MAX_N)
            here = tl.max(count, axis=0)
            away = tl.where(count == here, tl.abs(place - output_len), 2147483647)
            nearest, index = tl.min(away, axis=0, return_indices=True)
            better = (here > most) | ((here == most) & (nearest < distance))
            at = tl.where(better, start + index, at)
            distance = tl.where(better, nearest, distance)
            most = tl.maximum(most, here)
        if most >= tl.maximum(best, min_n):
            out = tl.load(text + at + step, mask=at + step < size, other=-1)
    tl.store(drafts + row * num_drafts + step, out.to(tl.int64), mask=step < num_drafts)


def ngram_scan(
    haystack: Haystack,
    slots: Tensor,
    lengths: Tensor,
    min_n: int,
    max_n: int,
    num_drafts: int,
) -> Tensor:
    """See `kernels.drafts.ngram_scan.ngram_scan`."""
    drafts = torch.empty(slots.shape[0], num_drafts, dtype=torch.int64, device=slots.device)
    texts = haystack.predictions
    if slots.shape[0]:
        _scan_kernel[(slots.shape[0],)](
            haystack.token_ids,
            haystack.prompt_len,
            haystack.token_ids if texts is None else texts.token_ids,
            slots if texts is None else texts.start,
            slots if texts is None else texts.length,
            slots.contiguous(),
            lengths.contiguous(),
            drafts,
            haystack.token_ids.stride(0),
            min_n,
            num_drafts,
            MAX_N=max_n,
            HAS_PREDICTION=texts is not None,
            BLOCK=BLOCK,
            K=triton.next_power_of_2(num_drafts),
        )
    return drafts
