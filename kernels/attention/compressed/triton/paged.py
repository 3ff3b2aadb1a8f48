"""The part of the compressed caches' kernels that finds rows by position."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offsets(
    table,
    position,
    inside,
    BLOCK_SIZE: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Where the rows of WIDTH that hold some positions of the request with this table row begin.

    The two products are added, because Triton takes the sum of a loaded block and of consecutive
    places for a multiple of BLOCK_SIZE: multiplied afterwards, rows of 132 bytes would count as
    aligned to 16, and loads of 16 bytes at once end with "misaligned address".
    """
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    place = position % BLOCK_SIZE // ENTRY_TOKENS
    return block * (BLOCK_SIZE // ENTRY_TOKENS * WIDTH) + place * WIDTH
