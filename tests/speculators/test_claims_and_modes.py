"""Steps are right with every claim of attention, in every mode and with every drafter."""

from __future__ import annotations

import pytest

from slipstream.configs.graphs import AttentionCGSupport, CUDAGraphMode
from slipstream.runner.graphs.dispatch import GraphConfigError

from ..cases import some
from .all_drafters import METHODS, Drafters
from .recorded_graphs import TensorBuilder, graph_engine
from .tiny_engine import prompts

ASKED = prompts(2, seed=2, longest=12)
NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport
FULL, BOTH = CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE
MODES = [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.NONE]
# An engine in each mode, since modes are resolved alike for all drafters; then what differs.
CASES = [("eagle", mode) for mode in MODES] + [
    (method, BOTH) for method in METHODS if method != "eagle"
]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize(
    ("method", "mode"),
    some(CASES, kept=[case for case in CASES if case[0] == "eagle"]),
    ids=str,
)
def test_every_claim_serves(
    drafters: Drafters, method: str, mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills, steps that verify, and steps of one token without drafts."""
    target, config = drafters.pair(method)[0], drafters.speculative(method, 1)
    is_full = mode.decode_mode() is FULL
    texts = []
    for claim in AttentionCGSupport:
        monkeypatch.setattr(TensorBuilder, "supports", claim)
        if mode is FULL and claim is NEVER:
            with pytest.raises(GraphConfigError), graph_engine(target, config, mode=mode):
                pass
            continue
        with graph_engine(target, config, mode=mode, sizes=[4]) as engine:
            texts.append(engine.run(ASKED, max_tokens=4).tokens)
            verified = engine.replays.get("target", 0)
            prefills = engine.replays.get("draft prefill", 0)
            texts.append(engine.run(ASKED, max_tokens=4, speculative_enabled=False).tokens)
            single = engine.replays.get("target", 0) - verified
        assert (verified > 0) == (is_full and claim >= UNIFORM), claim
        assert (single > 0) == (is_full and claim >= SINGLE), claim
        assert prefills == (verified if method != "gemma4_mtp" else 0), claim
    assert all(text == texts[0] for text in texts)
