"""How programs of different ranks exchange words: see `PacketMemory`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from ....launch import hash_functions
from ..memory import PROGRAMS, WORDS

_PROGRAMS, _WORDS = tl.constexpr(PROGRAMS), tl.constexpr(WORDS)


@triton.jit
def send_words(words, peers, number, program, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write `words` [WORDS] int32 with the number of this exchange to every other rank.

    Returns where the packets of this program begin in the memory of each rank.
    """
    packet = (words.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    place = ((number & 1) * _PROGRAMS + program) * RANKS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.multiple_of(peers[rank].to(tl.pointer_type(tl.int64)), 16)
            tl.store(there + (place + RANK) * _WORDS + tl.arange(0, _WORDS), packet)
    return place


@triton.jit
def words_of(rank, mine, number, place):
    """Wait for the words [WORDS] int32 that another rank has sent in this exchange."""
    source = mine + (place + rank) * _WORDS + tl.arange(0, _WORDS)
    packet = tl.load(source, volatile=True)
    while tl.min(((packet >> 32).to(tl.int32) == number).to(tl.int32), 0) == 0:
        packet = tl.load(source, volatile=True)
    return packet.to(tl.int32)


hash_functions(globals())
