"""Whatever attention claims, in every mode and with every drafter, steps are served and right."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.configs.graphs import AttentionCGSupport, CUDAGraphMode
from slipstream.runner.graphs.dispatch import GraphConfigError, GraphRole, descriptors, resolve_mode

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


@pytest.mark.parametrize(("method", "mode"), CASES, ids=str)
def test_every_claim_serves(
    drafters: Drafters, method: str, mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills, steps that verify and, where nothing is drafted, steps of one token."""
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("claim", AttentionCGSupport)
@pytest.mark.parametrize("counts", [(1,), (3,), (1, 2, 3, 5, 8)])
def test_every_graph_of_a_draft_prefill_is_whole_and_follows_one_of_the_targets(
    mode: CUDAGraphMode, claim: AttentionCGSupport, counts: tuple[int, ...]
) -> None:
    if mode is FULL and claim is NEVER:
        return
    lengths = sorted({1, *(count + 1 for count in counts)})

    def graphs(wanted: CUDAGraphMode, role: GraphRole) -> tuple[CUDAGraphMode, set[Any]]:
        decision = resolve_mode(wanted, claim, role, lengths)
        sizes = (1, 2, 4, 8, 16, 32)
        found = descriptors(decision.mode, decision.uniform_token_counts, sizes, 8, 96)
        return decision.mode, set(found)

    resolved, of_target = graphs(mode, GraphRole.TARGET)
    of_drafter = graphs(resolved.without_pieces(), GraphRole.DRAFT_PREFILL)[1]
    assert all(desc.mode is FULL for desc in of_drafter)
    # each whole step of the target has its draft prefill, and no other step
    assert of_drafter == {desc for desc in of_target if desc.mode is FULL}
