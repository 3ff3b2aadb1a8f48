"""The part of the compressed caches' kernels that finds rows by position."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(table, position, inside, BLOCK_SIZE: tl.constexpr, ENTRY_TOKENS: tl.constexpr):
    """The slots of the rows that hold some positions of the request with this row of the table."""
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + position % BLOCK_SIZE) // ENTRY_TOKENS
