"""Counter-based random numbers and Gumbel-max sampling; knows nothing about requests or batches.

The noise of a token is a pure function of seed, sequence position, salt and token id. It does not
depend on the batch row, padding, graphs or the number of GPUs. All mixing is 32-bit integer
arithmetic, so that Triton and torch produce the same bits. Streams with different salts are
independent. Drafts must never share the target's noise: the output's distribution would be wrong
although the acceptance rate looks right.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..operation import operation
from .random_streams import (
    ACCEPT,
    DRAFT,
    GOLDEN,
    MULTIPLIER_1,
    MULTIPLIER_2,
    RECOVERY,
    SECOND,
    TARGET,
    UNIFORM_SCALE,
)

__all__ = ["ACCEPT", "DRAFT", "RECOVERY", "TARGET", "gumbel_sample", "uniform"]

_LOW = 0xFFFFFFFF
_CHUNK = 1 << 18  # elements of noise made at once: temporaries stay in the CPU's cache


def gumbel_sample_reference(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    salt: int | Tensor,
    greedy: Tensor | None = None,
) -> Tensor:
    """Draw a token per row from softmax(logits) as argmax(logits + Gumbel noise); [L] int64.

    logits: [L, V] float32; seeds: [L] int64; positions: [L] int64, the sequence position of the
    row's input token; salt: one of the module's salts, or [L] int64; greedy: [L] bool, rows that
    get no noise.
    """
    keys = row_keys(seeds, positions, salt)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    step = max(1, _CHUNK // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        noise = gumbel_noise(keys[rows], vocab_size)
        if greedy is not None:
            noise.masked_fill_(greedy[rows, None], 0.0)
        torch.argmax(noise.add_(logits[rows]), dim=-1, out=tokens[rows])
    return tokens


gumbel_sample = operation(gumbel_sample_reference, "logits", ".triton.sample")


def uniform(seeds: Tensor, positions: Tensor, salt: int) -> Tensor:
    """Draw a uniform number in (0, 1) per row: [L] float32. seeds, positions: [L] int64."""
    keys = row_keys(seeds, positions, salt)
    return _uniform_(token_bits(keys, 1))[:, 0]


def gumbel_noise(keys: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise for every token from `first` on, [L, V] float32. keys: [L, 2] int32."""
    u = _uniform_(token_bits(keys, vocab_size, first))
    # -log(-log1p(-u)): large values come from u near 0, where float32 is fine-grained.
    return u.neg_().log1p_().neg_().log_().neg_()


def row_keys(seeds: Tensor, positions: Tensor, salt: int | Tensor) -> Tensor:
    """Hash seed, position and salt, each [L] int64, to 64 bits per row: [L, 2] int32."""
    low, high = seeds & _LOW, (seeds >> 32) & _LOW
    words = []
    for start in (GOLDEN, SECOND):
        word = _mix(low ^ start)
        word = _mix(word + GOLDEN ^ high)
        word = _mix(word + GOLDEN ^ positions)
        words.append(_mix(word + GOLDEN ^ salt))
    return torch.stack(words, dim=-1).int()  # keeps the low 32 bits


def token_bits(keys: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """32 random bits per row and token from `first` on, [L, V] int32. keys: [L, 2] int32."""
    x = _token_words(vocab_size, first, keys.device) ^ keys[:, :1]
    x.mul_(keys[:, 1:] | 1)
    for shift, multiplier in ((16, MULTIPLIER_1), (15, MULTIPLIER_2)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        x.mul_(_signed(multiplier))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _uniform_(bits: Tensor) -> Tensor:
    return bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(UNIFORM_SCALE)


def _mix(x: Tensor) -> Tensor:
    """Apply the 32-bit hash finaliser to an int64 tensor; the result is in [0, 2^32)."""
    x = x & _LOW
    x = (x ^ (x >> 16)) * MULTIPLIER_1 & _LOW
    x = (x ^ (x >> 15)) * MULTIPLIER_2 & _LOW
    return x ^ (x >> 16)


def _signed(word: int) -> int:
    """The int32 with these 32 bits."""
    return word - (1 << 32) if word >> 31 else word


@lru_cache(maxsize=16)
def _token_words(vocab_size: int, first: int, device: torch.device) -> Tensor:
    """The hashed token ids, [V] int32; cached, since they are the same for every row."""
    ids = torch.arange(first, first + vocab_size, dtype=torch.int64, device=device)
    return _mix(ids + GOLDEN).int()
