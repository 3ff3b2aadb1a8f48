"""Triton version of top-k and top-p: a radix search for the smallest logit to keep, not a sort.

That logit is the largest t for which the tokens at or above t suffice: there are k of them, or
their mass is p. Floats are mapped to integers in the same order, and the search finds two bits at a
time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens read at once


@triton.jit
def _ordered(x):
    """Map floats to uint32 keys in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _enough(row, vocab_size, top, key, at_least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the tokens with a key of at least max(key, at_least), or sum exp(logit - top)."""
    total = 0.0
    bound = tl.maximum(key, at_least)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        weight = tl.exp(x - top) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
        kept = (_ordered(x) >= bound) & (token < vocab_size)
        total += tl.sum(tl.where(kept, weight, 0.0), axis=0)
    return total


@triton.jit
def _search(row, vocab_size, top, wanted, at_least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key for which the tokens at or above it still count, or weigh, `wanted`."""
    prefix = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 30, tl.uint32)
    for _ in range(0, 16):
        low = prefix + unit
        middle = low + unit
        high = middle + unit
        sum_low = 0.0
        sum_middle = 0.0
        sum_high = 0.0
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            x = tl.load(row + token, mask=inside, other=float("-inf"))
            key = _ordered(x)
            inside = inside & (key >= at_least)
            weight = tl.exp(x - top) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            sum_low += tl.sum(tl.where(inside & (key >= low), weight, 0.0), axis=0)
            sum_middle += tl.sum(tl.where(inside & (key >= middle), weight, 0.0), axis=0)
            sum_high += tl.sum(tl.where(inside & (key >= high), weight, 0.0), axis=0)
        prefix = tl.where(sum_low >= wanted, low, prefix)
        prefix = tl.where(sum_middle >= wanted, middle, prefix)
        prefix = tl.where(sum_high >= wanted, high, prefix)
        unit = unit >> 2
    return prefix


@triton.jit
def _top_k_top_p_kernel(
    logits,  # [L, V] float32, in place
    top_k,  # [L] int64, 0 = off
    top_p,  # [L] float32, 1 = off
    stride,
    vocab_size,
    ANY_TOP_K: tl.constexpr,
    ANY_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    top = float("-inf")
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        top = tl.maximum(top, tl.max(x, axis=0))
    if top > float("-inf"):  # otherwise no token is allowed, and the row stays as it is
        bound = tl.full([], 0, tl.uint32)
        if ANY_TOP_K:
            k = tl.load(top_k + index)
            if (k > 0) & (k < vocab_size):
                wanted = k.to(tl.float32)  # counts are exact below 2^24
                bound = _search(row, vocab_size, top, wanted, bound, False, BLOCK)
        if ANY_TOP_P:
            p = tl.load(top_p + index)
            if p < 1.0:
                total = _enough(row, vocab_size, top, bound, bound, True, BLOCK)
                smallest = _search(row, vocab_size, top, p * total, bound, True, BLOCK)
                # For p near 0 every key suffices, even those above the largest logit.
                most = tl.max(_ordered(tl.full([1], 0.0, tl.float32) + top), axis=0)
                bound = tl.maximum(bound, tl.minimum(smallest, most))
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            x = tl.load(row + token, mask=inside, other=float("-inf"))
            out = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(row + token, out, mask=inside & (_ordered(x) < bound))


def apply_top_k_top_p(
    logits: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int | None, any_top_p: bool
) -> None:
    """See `kernels.sampling.process_logits.apply_top_k_top_p`; `max_top_k` saves nothing here."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    if num_rows:
        _top_k_top_p_kernel[(num_rows,)](
            logits,
            top_k.contiguous(),
            top_p.contiguous(),
            logits.stride(0),
            vocab_size,
            ANY_TOP_K=True,
            ANY_TOP_P=any_top_p,
            BLOCK=BLOCK,
            num_warps=16,
        )
