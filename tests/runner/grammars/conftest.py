"""The grammar pool that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.runner.grammars.pool import GrammarPool

from .pool_probe import build


@pytest.fixture(scope="package")
def pool() -> Iterator[GrammarPool]:
    backend = build()
    yield backend
    backend.shutdown()
