"""The self-draft oracle: a copy of the target as drafter is right at every position."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.configs.schema import SpeculativeConfig

from .tiny_engine import TinyEngine, prompts, save_llama


def speculative(model: Path, k: int, **changes: object) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="draft_model", model=str(model), num_speculative_tokens=k, **changes
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), layers=3)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_a_copy_of_the_target_is_accepted_at_every_position(target: Path, k: int) -> None:
    engine = TinyEngine(target, speculative(target, k, draft_sampling="greedy"))
    run = engine.run(prompts(6), max_tokens=1 + 8 * (k + 1))  # no run is cut at the end
    engine.close()
    assert run.num_drafts == 6 * 8
    assert run.accepted_per_pos == [run.num_drafts] * k


def test_text_is_that_of_the_target_alone(target: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other", seed=5, layers=2)
    alone = TinyEngine(target, SpeculativeConfig())
    drafted = TinyEngine(target, speculative(other, 3))
    asked = prompts(8, seed=3)
    assert drafted.run(asked).tokens == alone.run(asked).tokens
    alone.close()
    drafted.close()


def test_a_copy_is_mostly_accepted_with_probabilistic_drafts(target: Path) -> None:
    engine = TinyEngine(target, speculative(target, 4, draft_sampling="probabilistic"))
    run = engine.run(prompts(6), max_tokens=41, temperature=1.0)
    engine.close()
    assert run.accepted == run.drafted  # p = q, so every draft is accepted
