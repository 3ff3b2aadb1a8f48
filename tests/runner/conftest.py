"""Lets the tests of this folder import shared fakes by name, and holds fixtures of several
files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..speculators.tiny_engine import TinyEngine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only folder with a tiny target and two heads for it."""
    from .exchanging import target_and_heads

    return target_and_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def running(heads: Path) -> Iterator[TinyEngine]:
    """An engine that drafts with the first of these heads."""
    from .exchanging import engine

    made = engine(heads)
    yield made
    made.close()
