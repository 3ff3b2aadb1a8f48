"""A streamed chunk of which only the text changes: what is around the text is encoded once.

It is cut out of a chunk that was encoded as usual, so both are the same bytes by construction.
"""

from __future__ import annotations

import secrets

from ..openai_types.replies import encode

PLACE = secrets.token_hex(16)  # stands where the text will be; in no client's id or model name


class ChunkTemplate:
    """One stream's chunks."""

    __slots__ = ("_before", "_behind")

    def __init__(self, framed: bytes) -> None:
        """`framed` is an event whose text is PLACE."""
        self._before, self._behind = framed.split(encode(PLACE))

    def fill(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + encode(text) + self._behind
