"""GLM-4.5 drafts with its own module as the plain statement does, and without changing the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.configs.schema import SpeculativeConfig

from .mtp_oracle import MtpOracle
from .recorded_proposals import recorded_proposals
from .tiny_engine import TinyEngine, prompts

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("glm") / "target"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> MtpOracle:
    return MtpOracle(folder, family="Glm4Moe")


def test_drafts_equal_the_plain_statement(folder: Path, oracle: MtpOracle) -> None:
    asked = prompts(5)
    off = TinyEngine(folder, SpeculativeConfig(method="off"))
    drafting = TinyEngine(
        folder,
        SpeculativeConfig(method="mtp", num_speculative_tokens=K, draft_sampling="greedy"),
    )
    with recorded_proposals() as seen:
        run = drafting.run(asked, max_tokens=16)
    assert run.tokens == off.run(asked, max_tokens=16).tokens
    off.close()
    drafting.close()
    assert run.accepted < run.drafted and len(seen) > 20
    for tokens, drafts in seen[::3]:  # the oracle takes long
        assert drafts == oracle.drafts(tokens, K), f"after {len(tokens)} tokens"
        if len(tokens) > 1:
            assert drafts[0] == oracle.first_draft_of_transformers(tokens)
