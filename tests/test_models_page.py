"""docs/models.md lists every supported architecture, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from slipstream.configs.model.model_config import ARCHITECTURES
from slipstream.runner.models.registry import ARCHITECTURES as BUILT

ROOT = Path(__file__).parents[1]


def test_the_page_lists_what_is_supported() -> None:
    page = (ROOT / "docs/models.md").read_text()
    named = set(re.findall(r"`(\w+For\w+)`", page))
    assert named == set(ARCHITECTURES) == set(BUILT)
    tests = set(re.findall(r"`(tests/[\w/]+\.py)`", page))
    assert tests and all((ROOT / name).exists() for name in tests)
