"""Identifies the contents of KV blocks by chained hashes over token ids.

A block's hash covers every token before it, so equal hashes mean equal prefixes. A drafter's KV at
a position also depends on the next token, so the hash of a block with such KV covers one token
more. Knows nothing about which requests hold a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from struct import Struct


class BlockHashes:
    """Hashes of the full blocks of a token list that only grows. Computed on demand.

    `extra_key` keeps equal token lists with different keys from sharing blocks.
    """

    def __init__(self, token_ids: list[int], extra_key: bytes = b"") -> None:
        self._token_ids = token_ids
        self._root = blake2b(extra_key, digest_size=16).digest()
        self._chains: dict[tuple[int, bool], list[bytes]] = {}  # (block size, shifted) -> hashes

    @property
    def num_tokens(self) -> int:
        """Number of tokens known."""
        return len(self._token_ids)

    def first(self, num_blocks: int, block_size: int, next_token: bool = False) -> list[bytes]:
        """Return at least the first `num_blocks` hashes for this block size.

        With `next_token` a block's hash also covers the token after it, which must be known.
        """
        chain = self._chains.get((block_size, next_token))
        if chain is None:
            chain = self._chains[block_size, next_token] = []
        known = len(chain)
        if known >= num_blocks:
            return chain
        # With `next_token` each block's content is shifted by one token; the root covers the first.
        token_ids, shift = self._token_ids, int(next_token)
        assert num_blocks * block_size + shift <= len(token_ids)
        pack = _packer(block_size)
        if chain:
            parent = chain[-1]
        elif next_token:
            parent = blake2b(self._root + _packer(1)(token_ids[0]), digest_size=16).digest()
        else:
            parent = self._root
        end = num_blocks * block_size + shift
        for start in range(known * block_size + shift, end, block_size):
            content = pack(*token_ids[start : start + block_size])
            parent = blake2b(parent + content, digest_size=16).digest()
            chain.append(parent)
        return chain


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    """A function that packs a block's token ids into bytes; far faster than `array`."""
    return Struct(f"<{block_size}i").pack
