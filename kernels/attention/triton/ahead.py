"""What attention prefetches into L2 while the kernel before it still runs."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ...launch import fetch_early, hash_functions

AHEAD_MIB = 0  # of the weights after attention, while few requests attend


@triton.jit
def fetch_first_tile(
    key_cache, value_cache, table, low, high, key, kv_head,
    ROW: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Prefetch the keys and values of a split's first tile into L2."""
    at = tl.maximum(tl.minimum(low + key, high - 1), 0)
    page = tl.load(table + at // PAGE).to(tl.int64)
    line = tl.arange(0, (BLOCK_D + 63) // 64) * 64
    line_of = (page * PAGE + at % PAGE) * ROW + kv_head * DIM
    fetch_early(key_cache + line_of[:, None] + line[None, :])
    fetch_early(value_cache + line_of[:, None] + line[None, :])


@triton.jit
def fetch_ahead(ahead, size, LINES: tl.constexpr):
    """Prefetch this program's LINES lines of 128 bytes of `size` bytes."""
    program = tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    program = tl.program_id(0) + tl.num_programs(0) * program
    byte = (program * LINES + tl.arange(0, LINES)) * 128
    fetch_early(ahead + tl.minimum(byte, size - 1))


def lines_ahead(size: int, programs: int) -> int:
    """Lines of 128 bytes that each program prefetches of weights of `size` bytes: a power of 2."""
    lines = min(size, AHEAD_MIB << 20) // (128 * programs)
    return min(1 << lines.bit_length() - 1, 1024) if lines > 0 else 0


hash_functions(globals())
