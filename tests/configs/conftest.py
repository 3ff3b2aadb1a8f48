"""A model folder for tests of configurations."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model folder that exists and is not a preset."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)
