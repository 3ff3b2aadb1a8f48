"""`--batch-invariant` on a CPU: tokens and log probabilities depend on nothing but the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..cases import some
from .invariance import MODELS, check, save_model

KINDS = [(kind, dtype) for kind in MODELS for dtype in ("auto", "float32")]


@pytest.mark.parametrize(
    ("kind", "dtype"), some(KINDS, kept=[("Llama", "auto"), ("DeepseekV3", "float32")])
)
def test_any_company_gets_the_same_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    check(save_model(kind, tmp_path / kind), rounds=2, seed=0, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_many_companies_get_the_same_bits(kind: str, tmp_path: Path) -> None:
    folder = save_model(kind, tmp_path / kind)
    for seed in range(1, 4):
        check(folder, rounds=8, seed=seed, dtype="auto")
