"""EAGLE heads against a plain implementation: prefill, chunks, roll-back, formats, prefix hits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.draft_models.draft_config import choose_boundaries, read_draft_config
from slipstream.runner.draft_models.eagle import EagleHead
from slipstream.runner.draft_models.eagle3 import Eagle3Head
from slipstream.runner.errors import ModelLoadError

from ..runner.model_harness import Sequences, load
from .eagle_oracle import VOCAB, HeadOracle, head_weights, save_head
from .recorded_proposals import Proposals, recorded_proposals
from .tiny_engine import TinyEngine, prompts, save_llama

K = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture
def proposals() -> Iterator[Proposals]:
    with recorded_proposals() as seen:
        yield seen


def speculative(folder: Path, method: str, **changes: object) -> SpeculativeConfig:
    options = {"num_speculative_tokens": K, "draft_sampling": "greedy"} | changes
    return SpeculativeConfig(method=method, model=str(folder), **options)  # type: ignore[arg-type]


def check(seen: Proposals, oracle: HeadOracle, at_least: int) -> None:
    assert len(seen) >= at_least
    for tokens, drafts in seen[::2]:  # the oracle takes long
        assert drafts == oracle.drafts(tokens, len(drafts)), f"after {len(tokens)} tokens"


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle3_drafts_equal_the_plain_statement(
    target: Path, tmp_path: Path, proposals: Proposals, norm_before_residual: bool
) -> None:
    weights = head_weights(eagle3=True)
    head = save_head(tmp_path, weights, True, norm_before_residual=norm_before_residual)
    engine = TinyEngine(target, speculative(head, "eagle3"))
    run = engine.run(prompts(4), max_tokens=12)
    engine.close()
    assert run.accepted < run.drafted  # rejections happened, so roll-back was exercised
    check(proposals, HeadOracle(target, weights, True, (2, 4, 5), norm_before_residual), 20)


def test_eagle1_drafts_equal_the_plain_statement(
    target: Path, tmp_path: Path, proposals: Proposals
) -> None:
    weights = head_weights(eagle3=False)
    engine = TinyEngine(target, speculative(save_head(tmp_path, weights, False), "eagle"))
    engine.run(prompts(4), max_tokens=12)
    engine.close()
    check(proposals, HeadOracle(target, weights, False), 20)


def test_chunked_prefill_drafts_the_same(
    target: Path, tmp_path: Path, proposals: Proposals
) -> None:
    weights = head_weights(eagle3=True)
    head = save_head(tmp_path, weights, True)
    scheduler = {"max_num_seqs": 2, "max_num_batched_tokens": 8}
    engine = TinyEngine(target, speculative(head, "eagle3"), scheduler=scheduler)
    engine.run(prompts(3, seed=9, longest=60), max_tokens=8)
    engine.close()
    check(proposals, HeadOracle(target, weights, True, (2, 4, 5)), 9)


def test_prefix_hit_drafts_equal_a_cold_run(
    target: Path, tmp_path: Path, proposals: Proposals
) -> None:
    weights = head_weights(eagle3=True)
    engine = TinyEngine(target, speculative(save_head(tmp_path, weights, True), "eagle3"))
    prefix = prompts(1, seed=4, longest=80)[0] + list(range(40))
    engine.run([prefix], max_tokens=4)
    hit = engine.run([prefix + [7, 8, 9]], max_tokens=12)
    engine.close()
    assert hit.cached_tokens["0"] >= len(prefix) - 2 * 4
    check(proposals, HeadOracle(target, weights, True, (2, 4, 5)), 8)


def test_speculators_format_and_own_embeddings(
    target: Path, tmp_path: Path, proposals: Proposals
) -> None:
    weights = head_weights(eagle3=True)
    weights["embed_tokens.weight"] = torch.randn(VOCAB, 32)
    weights["input_norm.weight"] = torch.rand(96) + 0.5
    renamed = {name.replace("midlayer.", "layers.0."): w for name, w in weights.items()}
    head = save_head(tmp_path, renamed, True)
    raw = json.loads((head / "config.json").read_text())
    config = {
        "speculators_model_type": "eagle3", "transformer_layer_config": raw,
        "draft_vocab_size": raw["draft_vocab_size"], "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }  # fmt: skip
    (head / "config.json").write_text(json.dumps(config))
    engine = TinyEngine(target, speculative(head, "eagle3"))
    engine.run(prompts(3), max_tokens=10)
    engine.close()
    check(proposals, HeadOracle(target, weights, True, (1, 3, 4)), 9)


def test_unknown_and_missing_tensors_are_named(target: Path, tmp_path: Path) -> None:
    weights = head_weights(eagle3=True)
    extra = weights | {"surprise.weight": torch.zeros(3)}
    with pytest.raises(ModelLoadError, match="surprise.weight"):
        TinyEngine(target, speculative(save_head(tmp_path / "extra", extra, True), "eagle3"))
    del weights["midlayer.hidden_norm.weight"]
    with pytest.raises(ModelLoadError, match="hidden_norm"):
        TinyEngine(target, speculative(save_head(tmp_path / "less", weights, True), "eagle3"))


def test_map_beyond_the_vocabulary_is_an_error(target: Path, tmp_path: Path) -> None:
    weights = head_weights(eagle3=True)
    weights["d2t"] = weights["d2t"] + VOCAB
    with pytest.raises(ModelLoadError, match="d2t"):
        TinyEngine(target, speculative(save_head(tmp_path, weights, True), "eagle3"))


@pytest.mark.parametrize(
    ("raw", "speculators_format", "taps"),
    [
        ({}, False, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, False, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, False, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, True, (1, 15, 28)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 14, 27]},
            },
            False,
            (1, 15, 28),
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 32]}, True, (2, 18, 32)),
    ],
)
def test_layer_ids_become_boundaries(
    raw: dict[str, object], speculators_format: bool, taps: tuple[int, ...]
) -> None:
    assert choose_boundaries(raw, speculators_format, 32) == taps
    assert choose_boundaries(raw, speculators_format, 32, (0, 5, 32)) == (0, 5, 32)


def test_boundaries_out_of_order_or_range_are_an_error() -> None:
    for ids in ([5, 3, 9], [2, 16, 33]):
        with pytest.raises(ModelLoadError, match="boundaries"):
            choose_boundaries({"eagle_aux_hidden_state_layer_ids": ids}, True, 32)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_what_is_taken_in_leaves_the_kv_of_a_whole_pass(target: Path, num_layers: int) -> None:
    """With one layer the MLP is skipped; a second layer would need it."""
    model = load(target)
    config = LlamaConfig.from_pretrained(target, num_hidden_layers=num_layers)
    raw = config.to_dict() | {"target_hidden_size": 32}
    settings = read_draft_config(raw, True, 32, model.config.num_hidden_layers)
    head = Eagle3Head(settings, config, model.format, model, 64, 0)
    for slot in head.checkpoint_slots().values():
        slot.load(torch.randn(slot.shape))
    caches = []
    for run in (head.forward, head.write_kv):
        sequences = Sequences(cast(Any, head), 2, 16)
        torch.manual_seed(1)
        for counts in ([5, 3], [1, 4]):
            attention, positions = sequences.attention([0, 1], counts)
            ids = torch.randint(0, VOCAB, (len(positions),))
            with torch.inference_mode():
                run(ids, positions, torch.randn(len(positions), 32), attention)
            sequences.lengths = [5, 3]
        caches.append(sequences.cache.kv_caches)
    assert caches[0].keys() == caches[1].keys() and len(caches[0]) == num_layers
    for layer, kv in caches[0].items():
        assert kv.any() and torch.equal(kv, caches[1][layer])


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("eagle3", [False, True])
def test_behind_the_last_attention_only_wanted_rows_are_computed(
    target: Path, num_layers: int, eagle3: bool
) -> None:
    model = load(target)
    config = LlamaConfig.from_pretrained(target, num_hidden_layers=num_layers)
    raw = config.to_dict() | {"target_hidden_size": 32}
    settings = read_draft_config(raw, eagle3, 32, model.config.num_hidden_layers)
    kind = Eagle3Head if eagle3 else EagleHead
    head: Any = kind(settings, config, model.format, model, 64, 0)
    for slot in head.checkpoint_slots().values():
        slot.load(torch.randn(slot.shape))
    rows: list[list[int]] = []

    def count(parts: Any) -> Any:
        def counted(x: torch.Tensor, *rest: Any) -> Any:
            rows[-1].append(x.shape[0])
            return parts(x, *rest)

        return counted

    for block in head.blocks:
        block.mlp.parts = count(block.mlp.parts)
    outs = []
    for only in (None, torch.tensor([4, 7])):
        sequences = Sequences(head, 2, 16)
        attention, positions = sequences.attention([0, 1], [5, 3])
        torch.manual_seed(1)
        ids = torch.randint(0, VOCAB, (8,))
        rows.append([])
        with torch.inference_mode():
            out = head.forward(ids, positions, torch.randn(8, 32), attention, only=only)
        outs.append(torch.stack(out) if eagle3 else out)
    assert rows == [[8] * num_layers, [8] * (num_layers - 1) + [2]]
    torch.testing.assert_close(outs[1], outs[0][..., [4, 7], :], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("stated", "stored"), [({}, True), ({"bias": False}, True), ({"bias": True}, False)], ids=str
)
def test_the_tensors_decide_which_layers_of_a_head_have_a_bias(
    target: Path, tmp_path: Path, proposals: Proposals, stated: dict[str, bool], stored: bool
) -> None:
    """Most EAGLE-1 heads store a bias that their configs do not mention."""
    weights = head_weights(eagle3=False)
    if stored:
        sizes = {"fc": 32, "mlp.down_proj": 32, "mlp.up_proj": 48, "mlp.gate_proj": 48}
        sizes |= {
            f"self_attn.{kind}_proj": size for kind, size in zip("qkv", (32, 16, 16), strict=True)
        }
        for name, size in sizes.items():
            name = name if name == "fc" else f"layers.0.{name}"
            weights[f"{name}.bias"] = torch.randn(size)
    head = save_head(tmp_path, weights, False)
    config = json.loads((head / "config.json").read_text())
    del config["bias"]
    (head / "config.json").write_text(json.dumps(config | stated))
    engine = TinyEngine(target, speculative(head, "eagle"))
    engine.run(prompts(2), max_tokens=10)
    engine.close()
    check(proposals, HeadOracle(target, weights, False), 6)
