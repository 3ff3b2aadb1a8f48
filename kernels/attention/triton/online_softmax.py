"""Parts of attention kernels: capping a block of scores and adding it to a running softmax."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import hash_functions

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1e30)  # start of a running maximum; unlike -inf it can be subtracted


@triton.jit
def soft_capped(scores, softcap):
    """Compute softcap * tanh(scores / softcap)."""
    return softcap * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * scores / softcap) + 1.0))


@triton.jit
def absorb(
    scores,  # [M, N] float32, not yet times log2(e)
    visible,  # [M, N]
    value,  # [N, D]
    top,  # [M] float32, running maximum, log2 domain
    total,  # [M] float32, sum of weights
    acc,  # [M, D] float32, weighted sum of values
    PRECISION: tl.constexpr,
):
    """Add a block of keys to the running softmax: the new (top, total, acc).

    A row may attend to none of the block's keys.
    """
    scores = tl.where(visible, scores * LOG2E, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def absorb_scaled(
    scores,  # [M, N] float32, log2 domain
    visible,  # [M, N]
    value,  # [N, D]
    top,  # [M] float32, running maximum, `LEAST` at first
    total,  # [M, N] float32, sums of weights; the caller sums over N after the last block
    acc,  # [M, D] float32, weighted sum of values
    PRECISION: tl.constexpr,
):
    """`absorb` in fewer instructions: scores are scaled already, and `total` is summed later."""
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    rescale = tl.exp2(top - new_top)[:, None]
    weights = tl.exp2(scores - new_top[:, None])
    total = total * rescale + weights
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale, input_precision=PRECISION)
    return new_top, total, acc


hash_functions(globals())
