"""Compares a request's bearer token with the API keys.

Keys and tokens are compared as bytes, because headers have no encoding and clients send UTF-8.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from ..errors import AuthenticationFailed


class KeyRing:
    """The accepted keys. The time of a comparison does not depend on which key matches, if any."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so the time of a comparison does not depend on the keys.
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> None:
        """Raise AuthenticationFailed unless `Authorization: Bearer KEY` has an accepted key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # `strip()` would also remove bytes of UTF-8 characters that Latin-1 reads as spaces.
        given = token.strip(" \t") if scheme.lower() == "bearer" else ""
        digest = _digest(given.encode("latin-1"))  # the bytes that the client sent
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationFailed(bool(given))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
