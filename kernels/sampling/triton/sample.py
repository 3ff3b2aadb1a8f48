"""Triton version of `kernels.sampling.sample`: the same bits, but the noise is never stored."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import hash_functions, pdl_options, wait_for_inputs
from .. import random_streams as constants

BLOCK = 4096  # tokens of one program

_GOLDEN = tl.constexpr(constants.GOLDEN)
_SECOND = tl.constexpr(constants.SECOND)
_MULTIPLIER_1 = tl.constexpr(constants.MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(constants.MULTIPLIER_2)
_SCALE = tl.constexpr(constants.UNIFORM_SCALE)


@triton.jit
def mix(x):
    """Apply the 32-bit hash finaliser to x, uint32."""
    x ^= x >> 16
    x *= _MULTIPLIER_1
    x ^= x >> 15
    x *= _MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def _key_word(low, high, position, salt, start):
    word = mix(low ^ start)
    word = mix((word + _GOLDEN) ^ high)
    word = mix((word + _GOLDEN) ^ position)
    return mix((word + _GOLDEN) ^ salt)


@triton.jit
def row_key(seed, position, salt):
    """Hash seed (int64), position (int64) and salt to two uint32 words."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    at = (position & 0xFFFFFFFF).to(tl.uint32)
    salt = salt.to(tl.uint32)
    first = _key_word(low, high, at, salt, tl.full([], _GOLDEN, tl.uint32))
    return first, _key_word(low, high, at, salt, tl.full([], _SECOND, tl.uint32))


@triton.jit
def uniform(key_0, key_1, token):
    """Draw a uniform number in (0, 1) for each token id; token: uint32."""
    x = mix(token + _GOLDEN) ^ key_0
    x = mix(x * (key_1 | 1))
    return ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _SCALE


@triton.jit
def log_1_minus(t):
    """Compute log(1 - t) for t in [0, 1], accurately near 0."""
    series = -t * (1.0 + t * (0.5 + t * (0.33333334 + t * (0.25 + t * 0.2))))
    return tl.where(t < 0.015625, series, tl.log(1.0 - t))


@triton.jit
def gumbel(key_0, key_1, token):
    """Draw standard Gumbel noise for each token id; token: uint32."""
    return -tl.log(-log_1_minus(uniform(key_0, key_1, token)))


@triton.jit
def best_of_greedy_row(
    logits, begin, vocab_size, BLOCK: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The largest logit of a part of a row, its column, and whether a logit is NaN."""
    lane = tl.arange(0, BLOCK)
    value = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at, is_nan = begin + lane, tl.zeros([BLOCK], tl.int32)
    for tile in range(TILES):
        column = begin + tile * BLOCK + lane
        logit = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
        logit = logit.to(tl.float32)
        is_nan |= (logit != logit).to(tl.int32)
        best_at = tl.where(logit > value, column, best_at)  # NaN is never larger
        value = tl.where(logit > value, logit, value)
    most = tl.max(value, 0)
    best_at = tl.min(tl.where(value == most, best_at, 2147483647), 0)
    return most, best_at, tl.max(is_nan, 0)


@triton.jit
def best_of_drawn_row(
    logits, begin, vocab_size, first, key_0, key_1, heat, BLOCK: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The best score of a part of a row, its column, whether a logit is NaN, and the largest
    logit. Each tile is reduced before the next, since the noise leaves no registers for more."""
    lane = tl.arange(0, BLOCK)
    most = tl.full([], float("-inf"), tl.float32)
    best_at, is_nan, top = begin, tl.full([], 0, tl.int32), most
    for tile in range(TILES):
        column = begin + tile * BLOCK + lane
        inside = column < vocab_size
        logit = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        is_nan = tl.maximum(is_nan, tl.max((logit != logit).to(tl.int32), 0))
        finite = tl.where(logit != logit, float("-inf"), logit)
        top = tl.maximum(top, tl.max(finite, 0))
        noise = gumbel(key_0, key_1, (column + first).to(tl.uint32))
        score = tl.div_rn(finite, heat + tl.zeros_like(finite)) + noise
        score = tl.where(inside, score, float("-inf"))
        value = tl.max(score, 0)
        at = tl.min(tl.where(score == value, column, 2147483647), 0)
        best_at = tl.where(value > most, at, best_at)
        most = tl.maximum(most, value)
    return most, best_at, is_nan, top


@triton.jit
def best_of(score, first_token):
    """Find the largest score and its token id; NaN counts as -inf, so the id is always valid."""
    score = tl.where(score == score, score, float("-inf"))
    value, index = tl.max(score, axis=0, return_indices=True)
    return value, first_token + index


@triton.jit(
    do_not_specialize=["salts"],
    do_not_specialize_on_alignment=["positions"],
)
def _gumbel_kernel(
    logits,  # [L, V]
    seeds,  # [L] int64
    positions,  # [L] int64
    salts,  # [L] int64, or a number
    greedy,  # [L] bool
    best,  # [L, B] float32
    best_token,  # [L, B] int32
    stride,
    vocab_size,
    num_blocks,
    SALT_PER_ROW: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    score = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    if SALT_PER_ROW:
        salt = tl.load(salts + row)
    else:
        salt = salts
    key_0, key_1 = row_key(tl.load(seeds + row), tl.load(positions + row), salt)
    noise = gumbel(key_0, key_1, token.to(tl.uint32))
    if HAS_GREEDY:
        noise = tl.where(tl.load(greedy + row) != 0, 0.0, noise)
    value, index = best_of(score + noise, block * BLOCK)
    tl.store(best + row * num_blocks + block, value)
    tl.store(best_token + row * num_blocks + block, index)


@triton.jit
def _pick_kernel(
    best,  # [L, B] float32
    best_token,  # [L, B] int32
    tokens,  # [L] int64
    num_blocks,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    tl.store(
        tokens + row,
        pick(best + row * num_blocks, best_token + row * num_blocks, num_blocks, BLOCKS)[1],
    )


@triton.jit
def pick(best, best_token, num_blocks, BLOCKS: tl.constexpr):
    """Find the best score over a row's blocks, and its token."""
    block = tl.arange(0, BLOCKS)
    value = tl.load(best + block, mask=block < num_blocks, other=float("-inf"))
    value, index = tl.max(value, axis=0, return_indices=True)
    return value, tl.load(best_token + index).to(tl.int64)


def gumbel_sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    salt: int | Tensor,
    greedy: Tensor | None = None,
) -> Tensor:
    """See `kernels.sampling.sample.gumbel_sample`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    salts = salt.contiguous() if isinstance(salt, Tensor) else salt
    _gumbel_kernel[(num_rows, num_blocks)](
        logits,
        seeds.contiguous(),
        positions.contiguous(),
        salts,
        seeds if greedy is None else greedy.contiguous(),
        best,
        best_token,
        logits.stride(0),
        vocab_size,
        num_blocks,
        SALT_PER_ROW=isinstance(salt, Tensor),
        HAS_GREEDY=greedy is not None,
        BLOCK=BLOCK,
        num_warps=8,
        **pdl_options(logits),
    )
    _pick_kernel[(num_rows,)](
        best,
        best_token,
        tokens,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        **pdl_options(tokens),
    )
    return tokens


hash_functions(globals())
