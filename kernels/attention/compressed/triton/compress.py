"""Triton version of `kernels.attention.compressed.compress`: a program for each token row, most of
which end at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ....launch import hash_functions
from ..pages import Compressor, Pages, TokenRows
from .paged import row_offsets
from .store_rows import store_rows
from .tail_rotary import rotate_pairs


@triton.jit
def _add_window(
    total,  # [DIM] sum of shares times kv
    mass,  # [DIM] sum of shares
    most,  # [DIM] greatest gate so far
    pending,
    table,
    bias,  # of the first row and channel
    first,  # position of the window's first token, may be negative
    column,  # where the window's channels begin in kv
    WIDTH: tl.constexpr,  # of a pending row
    GATE: tl.constexpr,  # from a token's kv to its gate
    CHANNELS: tl.constexpr,  # of a token's kv, and of a row of the bias
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.arange(0, DIM)[None, :]
    for start in range(0, RATIO, ROWS):
        place = start + tl.arange(0, ROWS)
        inside = (place < RATIO) & (first >= 0)
        row = pending + row_offsets(table, first + place, inside, BLOCK_SIZE, 1, WIDTH)
        source = row[:, None] + column + channel
        kv = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
        gate = tl.load(source + GATE, mask=inside[:, None], other=0.0).to(tl.float32)
        own = bias + place[:, None] * CHANNELS + channel
        gate += tl.load(own, mask=inside[:, None], other=0.0)
        gate = tl.where(inside[:, None], gate, float("-inf"))
        greatest = tl.maximum(most, tl.max(gate, axis=0))
        share = tl.exp(gate - greatest[None, :])
        shrink = tl.exp(most - greatest)
        total = total * shrink + tl.sum(share * kv, axis=0)
        mass = mass * shrink + tl.sum(share, axis=0)
        most = greatest
    return total, mass, most


@triton.jit(
    do_not_specialize=["columns"],
    do_not_specialize_on_alignment=[
        "pending_table", "positions", "requests", "slot_mapping",
    ],
)  # fmt: skip
def _compress_kernel(
    pending,  # [slots, WIDTH]
    pending_table,  # [N, columns] int32
    columns,
    positions,  # [M] int64
    requests,  # [M] int64
    slot_mapping,  # [M] int64, of the entries' cache
    entries,  # [slots, DIM], or IN_ORDER [M, DIM]
    bias,  # [RATIO, CHANNELS] float32
    weight,  # [DIM] float32
    cos_sin_cache,  # [positions, ROT] float32
    eps,
    WIDTH: tl.constexpr,
    KV: tl.constexpr,
    GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    ROWS: tl.constexpr,
    IN_ORDER: tl.constexpr,  # an entry is written at its token's row
):
    token = tl.program_id(0)
    position = tl.load(positions + token)
    slot = tl.load(slot_mapping + token)
    if ((position + 1) % RATIO != 0) | (slot < 0):
        return
    table = pending_table + tl.load(requests + token) * columns
    first = position + 1 - RATIO
    total = tl.zeros([DIM], tl.float32)
    mass = tl.zeros([DIM], tl.float32)
    most = tl.full([DIM], float("-inf"), tl.float32)
    own: tl.constexpr = DIM if OVERLAP else 0
    total, mass, most = _add_window(
        total, mass, most, pending, table, bias + own, first, KV + own,
        WIDTH, GATE - KV, CHANNELS, RATIO, BLOCK_SIZE, DIM, ROWS,
    )  # fmt: skip
    if OVERLAP:
        total, mass, most = _add_window(
            total, mass, most, pending, table, bias, first - RATIO, KV,
            WIDTH, GATE - KV, CHANNELS, RATIO, BLOCK_SIZE, DIM, ROWS,
        )  # fmt: skip
    entry = total / mass
    channel = tl.arange(0, DIM)
    entry *= 1.0 / tl.sqrt(tl.sum(entry * entry, axis=0) / DIM + eps)
    entry *= tl.load(weight + channel)
    even, odd = tl.split(tl.reshape(entry, (DIM // 2, 2)))
    even, odd, cos, sin = rotate_pairs(even, odd, first, cos_sin_cache, ROT, DIM // 2)
    rotated = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (DIM,))
    row = slot // RATIO
    if IN_ORDER:
        row = token.to(tl.int64)
    tl.store(entries + row * DIM + channel, rotated.to(entries.dtype.element_ty))


def compress(rule: Compressor, pending: Pages, tokens: TokenRows, entries: Pages) -> None:
    """See `kernels.attention.compressed.compress.compress`."""
    num_tokens = tokens.positions.shape[0]
    if num_tokens == 0:
        return
    assert pending.cache.is_contiguous() and entries.cache.is_contiguous()
    assert pending.block_table.stride(1) == 1 and rule.dim & (rule.dim - 1) == 0
    rows = min(8, triton.next_power_of_2(rule.entry_tokens))
    packed = entries.fp8 is not None
    found = pending.cache.new_empty(num_tokens, 1, rule.dim) if packed else entries.cache
    _compress_kernel[(num_tokens,)](
        pending.cache, pending.block_table, pending.block_table.stride(0),
        tokens.positions, tokens.requests, entries.slot_mapping, found,
        rule.bias, rule.weight, rule.cos_sin_cache, rule.eps,
        WIDTH=pending.cache.shape[-1], KV=rule.kv_column, GATE=rule.gate_column,
        CHANNELS=rule.width, OVERLAP=rule.overlap, RATIO=rule.entry_tokens,
        BLOCK_SIZE=pending.block_size, DIM=rule.dim, ROT=rule.cos_sin_cache.shape[1], ROWS=rows,
        IN_ORDER=packed, num_warps=8,
    )  # fmt: skip
    if packed:
        store_rows(found, entries, tokens.positions)


hash_functions(globals())
