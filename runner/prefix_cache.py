"""Names for the contents of KV blocks: chained hashes over token ids.

A block's hash covers every token before it, so equal hashes mean equal prefixes. Knows nothing
about who holds a block.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b


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
        chain = self._chains.setdefault(block_size, [])
        assert num_blocks * block_size <= len(self._token_ids)
        while len(chain) < num_blocks:
            start = len(chain) * block_size
            content = array("q", self._token_ids[start : start + block_size]).tobytes()
            parent = chain[-1] if chain else self._root
            chain.append(blake2b(parent + content, digest_size=16).digest())
        return chain
