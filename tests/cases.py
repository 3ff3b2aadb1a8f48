"""Cases of a test of which CI runs some, and `-m slow` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The cases, each one marked `slow` unless it is among those to be kept in CI."""
    cases = list(cases)
    assert all(case in cases for case in kept), "a case to keep is not among the cases"
    return [
        case
        if case in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
