"""`--batch-invariant` on a CPU: tokens and log probabilities depend on nothing but the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..cases import some
from .all_drafters import Drafters
from .invariance import MODELS, check, save_model

KINDS = [(kind, dtype) for kind in MODELS for dtype in ("auto", "float32")]


@pytest.mark.parametrize(
    ("kind", "dtype"), some(KINDS, kept=[("Llama", "auto"), ("DeepseekV3", "float32")])
)
def test_any_company_gets_the_same_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = save_model(kind, tmp_path / kind)
    count, longest = (8, 70) if dtype == "auto" else (5, 30)
    check(folder, rounds=1, seed=0, count=count, longest=longest, dtype=dtype)


def test_the_fuzz_finds_what_torch_does_without_the_flag(tmp_path: Path) -> None:
    folder = save_model("Llama", tmp_path / "Llama")
    with pytest.raises(AssertionError, match=r"of round 0"):
        graph = {"batch_invariant": False}
        check(folder, rounds=1, seed=0, count=7, longest=30, graph=graph, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_many_companies_get_the_same_bits(kind: str, seed: int, tmp_path: Path) -> None:
    check(save_model(kind, tmp_path / kind), rounds=4, seed=seed, dtype="auto")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
def test_a_cache_of_bytes_changes_nothing_of_it(kind: str, tmp_path: Path) -> None:
    cache = {"kv_cache_dtype": "fp8"}
    check(save_model(kind, tmp_path / kind), rounds=2, seed=4, cache=cache, dtype="float32")


@pytest.mark.slow
def test_drafts_of_a_head_change_no_bit(tmp_path: Path) -> None:
    drafters = Drafters(tmp_path)
    target = drafters.pair("eagle3")[0]
    heads = [drafters.speculative("eagle3", k, watchdog=False) for k in (1, 3, 4)]
    for dtype in ("auto", "float32"):
        check(target, rounds=2, seed=5, drafters=heads, vocab=61, count=6, dtype=dtype)
