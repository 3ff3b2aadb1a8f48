"""DeepSeek's MTP module against transformers: prefill, chunks, roll-back, prefix hits, loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.errors import ModelLoadError

from .mtp_oracle import LAYERS, MtpOracle
from .recorded_proposals import recorded_proposals
from .tiny_engine import TinyEngine, prompts, save_llama

K = 4


def speculative(folder: Path | None = None, **changes: object) -> SpeculativeConfig:
    options = {"num_speculative_tokens": K, "draft_sampling": "greedy"} | changes
    model = None if folder is None else str(folder)
    return SpeculativeConfig(method="mtp", model=model, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp") / "target"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> MtpOracle:
    return MtpOracle(folder)


@pytest.mark.parametrize("feedback", ["post_norm", "pre_norm"])
def test_trap_11_drafts_equal_the_plain_statement_for_k_steps(
    folder: Path, oracle: MtpOracle, feedback: str
) -> None:
    engine = TinyEngine(folder, speculative(mtp_feedback=feedback))
    with recorded_proposals() as seen:
        run = engine.run(prompts(4), max_tokens=12)
    engine.close()
    assert run.accepted < run.drafted  # roll-back was exercised
    assert len(seen) > 16
    try:
        oracle.post_norm = feedback == "post_norm"
        for tokens, drafts in seen[::2]:  # the oracle takes long
            assert drafts == oracle.drafts(tokens, K), f"after {len(tokens)} tokens"
    finally:
        oracle.post_norm = True


def test_the_two_feedbacks_differ(oracle: MtpOracle) -> None:
    tokens = list(range(20))
    first = oracle.drafts(tokens, K)
    oracle.post_norm = False
    second = oracle.drafts(tokens, K)
    oracle.post_norm = True
    assert first[0] == second[0] and first != second


def test_the_first_draft_is_that_of_transformers(folder: Path, oracle: MtpOracle) -> None:
    engine = TinyEngine(folder, speculative())
    with recorded_proposals() as seen:
        engine.run(prompts(6, seed=2), max_tokens=5)
    engine.close()
    assert len(seen) >= 12
    for tokens, drafts in seen:
        if len(tokens) > 1:
            assert drafts[0] == oracle.first_draft_of_transformers(tokens)


def test_chunked_prefill_and_prefix_hits_draft_the_same(folder: Path, oracle: MtpOracle) -> None:
    scheduler = {"max_num_batched_tokens": 41, "max_num_seqs": 8}
    engine = TinyEngine(folder, speculative(), scheduler=scheduler)
    prefix = prompts(1, seed=4, longest=80)[0] + list(range(40))
    with recorded_proposals() as seen:
        engine.run([prefix, *prompts(2, seed=9, longest=60)], max_tokens=6)
        hit = engine.run([prefix + [7, 8, 9]], max_tokens=8)
    engine.close()
    assert hit.cached_tokens["0"] >= len(prefix) - 2 * 4
    assert len(seen) >= 10
    for tokens, drafts in seen[::2]:
        assert drafts == oracle.drafts(tokens, K), f"after {len(tokens)} tokens"


def test_text_is_that_of_the_target_alone(folder: Path, oracle: MtpOracle) -> None:
    alone, drafted = TinyEngine(folder, SpeculativeConfig()), TinyEngine(folder, speculative())
    asked = prompts(6, seed=3)
    assert drafted.run(asked, max_tokens=14).tokens == alone.run(asked, max_tokens=14).tokens
    alone.close()
    drafted.close()


def test_an_export_of_the_module_alone(folder: Path, oracle: MtpOracle, tmp_path: Path) -> None:
    export = oracle.save_export(tmp_path / "nextn")
    engine = TinyEngine(folder, speculative(export))
    with recorded_proposals() as seen:
        engine.run(prompts(3), max_tokens=8)
    engine.close()
    for tokens, drafts in seen:
        assert drafts == oracle.drafts(tokens, K)
    tensors = load_file(export / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(48)}, export / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unexpected tensors: model\.norm\.weight"):
        TinyEngine(folder, speculative(export))


def test_each_tensor_of_the_module_is_needed_and_known(
    folder: Path, oracle: MtpOracle, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    prefix = f"model.layers.{LAYERS}."
    for change, message in (
        ({f"{prefix}surprise.weight": torch.zeros(2)}, f"unexpected tensors: {prefix}surprise"),
        ({f"{prefix}hnorm.weight": None}, f"lacks tensors: {prefix}hnorm"),
    ):
        changed = {n: t for n, t in (tensors | change).items() if t is not None}
        save_file(changed, copy / "model.safetensors")
        with pytest.raises(ModelLoadError, match=message):
            TinyEngine(copy, speculative())


def test_random_weights_and_a_target_without_a_module(
    folder: Path, oracle: MtpOracle, tmp_path: Path
) -> None:
    engine = TinyEngine(folder, speculative(load_format="dummy"))
    assert engine.run(prompts(2), max_tokens=8).drafted > 0
    engine.close()
    with pytest.raises(
        ModelLoadError, match="mtp needs a DeepSeek V3, V3.2 or V4, GLM-4.5, Qwen3-Next or Qwen3.5"
    ):
        TinyEngine(save_llama(tmp_path), speculative())
