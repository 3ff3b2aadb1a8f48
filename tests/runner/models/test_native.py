"""Decoder layers in native code: the same numbers as torch's, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.cpu import weight
from slipstream.kernels.cpu.layers import NativeLayers
from slipstream.runner.draft_models.draft_config import read_draft_config
from slipstream.runner.draft_models.eagle3 import Eagle3Head
from slipstream.runner.models.base import TextModel

from ...cases import some
from ...speculators.all_drafters import Drafters
from ...speculators.tiny_engine import TinyEngine, prompts, save_llama
from ..model_harness import Sequences, load

VOCAB = 61
pytestmark = pytest.mark.skipif(
    not weight.available(), reason="no native CPU kernels on this machine"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), layers=3, heads=2)


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder, "auto")


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def logits_of(model: TextModel, ids: list[int], counts: list[int]) -> Tensor:
    """Logits of all tokens, computed in steps of so many."""
    sequences, at, rows = Sequences(model, 1, 64), 0, []
    for count in counts:
        rows += sequences.step([(0, ids[at : at + count])])[0]
        at += count
    return torch.cat(rows)


def test_logits_of_a_token_do_not_depend_on_the_step_it_comes_in(model: TextModel) -> None:
    """So a verified draft is what decoding without drafts would give, to the last bit."""
    ids = text(40)
    whole = logits_of(model, ids, [40])
    for counts in ([1] * 40, [13, 1, 1, 5, 2, 3, 15], [39, 1]):
        assert torch.equal(logits_of(model, ids, counts), whole)


def test_logits_of_a_request_do_not_depend_on_the_others(model: TextModel) -> None:
    one, other = text(20), text(31, seed=1)
    sequences = Sequences(model, 2, 64)
    together = [sequences.step([(0, one[:12]), (1, other)])[0][0]]
    together += [sequences.step([(1, [5]), (0, one[12:])])[0][1]]
    assert torch.equal(torch.cat(together), logits_of(model, one, [20]))


def test_threads_change_nothing(model: TextModel) -> None:
    before, ids = torch.get_num_threads(), text(30)
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(logits_of(model, ids, [20, *[1] * 10]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_streams_at_boundaries_are_those_of_torch(model: Any) -> None:
    decoder, ids, kept = model.decoder, text(9), []
    for model.decoder in (decoder, None):
        logits, taps = Sequences(model, 1, 16).step([(0, ids)], aux_boundaries=(0, 2, 3))
        kept.append(torch.cat([logits[0], *taps], dim=1))
    torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-4)


def test_new_weights_are_used(model: Any) -> None:
    ids, before = text(5), logits_of(model, text(5), [5])
    slot = model.checkpoint_slots()["model.layers.1.mlp.down_proj.weight"]
    slot.load(torch.zeros(slot.shape))
    after = logits_of(model, ids, [5])
    assert not torch.equal(after, before)
    model.decoder = None
    torch.testing.assert_close(logits_of(model, ids, [5]), after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle3_head_equals_torch(
    folder: Path, model: Any, num_layers: int, norm_before_residual: bool
) -> None:
    config = LlamaConfig.from_pretrained(folder, num_hidden_layers=num_layers)
    stated = {
        "target_hidden_size": 32,
        "norm_before_residual": norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
    }
    settings = read_draft_config(config.to_dict() | stated, True, 32, 3)
    head = Eagle3Head(settings, config, model.format, model, 64, 0)
    torch.manual_seed(0)
    for slot in head.checkpoint_slots().values():
        slot.load(torch.randn(slot.shape) * 0.3)
    decoder, got = head.decoder, []
    assert decoder is not None
    for head.decoder in (decoder, None):
        sequences: Any = Sequences(head, 2, 16)  # type: ignore[arg-type]
        attention, positions = sequences.attention([0, 1], [5, 3])
        assert decoder.runs(attention)
        torch.manual_seed(1)
        ids, hidden = torch.randint(0, VOCAB, (8,)), torch.randn(8, 32)
        wanted, kept = torch.tensor([4, 7]), hidden.clone()
        out = head.forward(ids, positions, hidden, attention, wanted)
        assert torch.equal(hidden, kept)
        got.append(torch.cat([x.flatten() for x in (*out, sequences.cache.kv_caches[0])]))
    torch.testing.assert_close(*got, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "method", some(["eagle3", "eagle", "draft_model", "gemma4_mtp"], ["eagle3", "draft_model"])
)
def test_text_with_drafts_is_the_text_without(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_calls: list[int] = []
    run = NativeLayers.run
    monkeypatch.setattr(NativeLayers, "run", lambda *a: native_calls.append(1) or run(*a))
    drafters = Drafters(tmp_path, wide_heads=True)
    target, asked = drafters.pair(method)[0], prompts(4)
    plain = TinyEngine(target, SpeculativeConfig(), dtype="auto")
    expected = plain.run(asked, max_tokens=16).tokens
    plain.close()
    drafting = TinyEngine(target, drafters.speculative(method), dtype="auto")
    got = drafting.run(asked, max_tokens=16)
    drafting.close()
    assert got.tokens == expected and got.drafted > 0
    assert bool(native_calls) == (method != "gemma4_mtp")  # torch runs Gemma 4's layers


def test_without_the_library_torch_computes_the_same(
    folder: Path, model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight, "available", lambda: False)
    fallback: Any = load(folder, "auto")
    assert fallback.decoder is None and not fallback.format.native
    ids = text(20)
    expected = logits_of(model, ids, [15, 1, 4])
    torch.testing.assert_close(logits_of(fallback, ids, [15, 1, 4]), expected, rtol=1e-3, atol=1e-3)
