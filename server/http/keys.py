"""Owns the comparison of a request's bearer token with the keys that the operator accepts.

Keys and tokens are compared as bytes: a header has no encoding, and clients send a key in UTF-8.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from ..errors import AuthenticationFailed


class KeyRing:
    """The accepted keys. Comparing takes the same time whichever key matches, or none."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so the time of a comparison does not depend on the keys.
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    def __bool__(self) -> bool:
        """Whether there is any key."""
        return bool(self._digests)

    def check(self, headers: Headers) -> None:
        """AuthenticationFailed unless the header `Authorization: Bearer KEY` has a known key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # `strip` alone would take bytes of a UTF-8 character for spaces.
        given = token.strip(" \t") if scheme.lower() == "bearer" else ""
        digest = _digest(given.encode("latin-1"))  # the bytes that the client sent
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationFailed(bool(given))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
