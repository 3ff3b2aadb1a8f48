"""Names for the contents of KV blocks: chained hashes over token ids.

A block's hash covers every token before it, so equal hashes mean equal prefixes. Knows nothing
about who holds a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from struct import Struct


class BlockHashes:
    """Hashes of the full blocks of one token list, which may only grow; made when asked for.

    `extra_key` separates what must not be shared although the tokens are equal.
    """

    def __init__(self, token_ids: list[int], extra_key: bytes = b"") -> None:
        self._token_ids = token_ids
        self._root = blake2b(extra_key, digest_size=16).digest()
        self._chains: dict[int, list[bytes]] = {}  # block size -> hashes

    def first(self, num_blocks: int, block_size: int) -> list[bytes]:
        """At least the first `num_blocks` hashes for this block size."""
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = []
        known = len(chain)
        if known >= num_blocks:
            return chain
        token_ids = self._token_ids
        assert num_blocks * block_size <= len(token_ids)
        pack = _packer(block_size)
        parent = chain[-1] if chain else self._root
        for start in range(known * block_size, num_blocks * block_size, block_size):
            content = pack(*token_ids[start : start + block_size])
            parent = blake2b(parent + content, digest_size=16).digest()
            chain.append(parent)
        return chain


@cache
def _packer(block_size: int) -> Callable[..., bytes]:
    """What makes bytes of a block's token ids; far faster than an `array`."""
    return Struct(f"<{block_size}i").pack
