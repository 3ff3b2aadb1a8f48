"""Qwen's MTP module against a plain statement, and a target with recurrent states that it drafts
for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs.graphs import CUDAGraphMode
from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.errors import ModelLoadError

from ..cases import some
from .qwen_oracle import QwenOracle
from .recorded_graphs import graph_engine
from .recorded_proposals import recorded_proposals
from .recurrent_engine import check, drive, engine, texts
from .tiny_engine import TinyEngine, prompts

K = 3


def speculative(k: int | None = K, **changes: object) -> SpeculativeConfig:
    options = {"num_speculative_tokens": k, "draft_sampling": "greedy"} | changes
    return SpeculativeConfig(method="mtp", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp") / "target"


@pytest.fixture(scope="module")
def oracle(folder: Path) -> QwenOracle:
    return QwenOracle(folder)


@pytest.mark.parametrize("feedback", ["post_norm", "pre_norm"])
def test_drafts_equal_the_plain_statement(folder: Path, oracle: QwenOracle, feedback: str) -> None:
    """Chunks, rejections, a step without drafts, and hits in the prefix cache among them."""
    made = engine(
        folder, speculative(mtp_feedback=feedback), scheduler={"max_num_batched_tokens": 41}
    )
    with recorded_proposals() as seen:
        run, _ = drive(made, texts(6), 6, random.Random(0))
    made.close()
    assert 0 < run.accepted < run.drafted
    assert any(run.cached_tokens.values())
    oracle.post_norm = feedback == "post_norm"
    for tokens, drafts in seen[::3]:
        assert drafts == oracle.drafts(tokens, K)[: len(drafts)], f"after {len(tokens)} tokens"
    oracle.post_norm = True


@pytest.mark.parametrize("family", some(["Qwen3_5Moe", "Qwen3Next"], kept=["Qwen3Next"]))
def test_drafts_of_a_module_with_experts(tmp_path: Path, family: str) -> None:
    oracle = QwenOracle(tmp_path / "target", family)
    made = TinyEngine(tmp_path / "target", speculative(2))
    with recorded_proposals() as seen:
        made.run(prompts(3), max_tokens=6)
    made.close()
    for tokens, drafts in seen:
        assert drafts == oracle.drafts(tokens, 2)


@pytest.mark.parametrize("k", some([1, 3], kept=[3]))
def test_text_is_that_of_the_target_alone(folder: Path, oracle: QwenOracle, k: int) -> None:
    run = check(folder, texts(8, seed=k), speculative(k), k)
    assert 0.1 < run.accepted / run.drafted < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("blocks", [45, 400])
def test_texts_of_many_requests(folder: Path, oracle: QwenOracle, k: int, blocks: int) -> None:
    cache = {"num_gpu_blocks_override": blocks}
    run = check(folder, texts(200, seed=k), speculative(k), k, cache=cache)
    assert 0.1 < run.accepted / run.drafted < 0.9


def test_graphs_give_the_texts_and_drafts_of_plain_steps(folder: Path, oracle: QwenOracle) -> None:
    """Whole steps, padded, replace eager ones; warm-up and capture leave nothing in the states."""
    found = []
    for graphs in (False, True):
        with graph_engine(folder, speculative(), graphs, cache={"state_block_size": 8}) as made:
            states = made.engine._runner._target.states  # type: ignore[attr-defined]
            assert not any(bool(one.state[:-1].any()) for one in states.states.values())
            assert not states.table.values.any()
            with recorded_proposals() as seen:
                run, _ = drive(made, texts(6), 8, random.Random(4), aborts=False)
        found.append((run.tokens, sorted(seen)))
        assert bool(made.replays.get("target")) == graphs
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "mode",
    some(
        [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE],
        kept=[CUDAGraphMode.FULL_AND_PIECEWISE],
    ),
)
def test_graphs_that_are_cut_at_recurrent_layers(
    folder: Path, oracle: QwenOracle, mode: CUDAGraphMode
) -> None:
    asked = texts(3, seed=1)
    wanted = engine(folder, SpeculativeConfig())
    plain = wanted.run(asked, max_tokens=6).tokens
    wanted.close()
    with graph_engine(folder, speculative(2), mode=mode) as made:
        assert made.run(asked, max_tokens=6).tokens == plain


def test_a_checkpoint_without_the_module_is_refused(
    folder: Path, oracle: QwenOracle, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for change, message in (
        ({name: None for name in tensors if name.startswith("mtp.")}, r"has no mtp\.\* tensors"),
        ({"mtp.fc.weight": None}, r"lacks tensors: mtp\.fc\.weight"),
        ({"mtp.surprise.weight": torch.zeros(2)}, r"unexpected tensors: mtp\.surprise"),
    ):
        changed = {n: t for n, t in (tensors | change).items() if t is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=message):
            TinyEngine(tmp_path, speculative())


def test_a_model_with_states_cannot_be_a_draft_model(folder: Path, oracle: QwenOracle) -> None:
    drafter = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=2)
    with pytest.raises(ModelLoadError, match="cannot be a drafter"):
        TinyEngine(folder, drafter)


def test_random_weights_and_a_draft_length_chosen_for_each_step(
    folder: Path, oracle: QwenOracle
) -> None:
    """Random drafts are rejected, so that K = 0 may be chosen at once."""
    made = TinyEngine(folder, speculative(None, load_format="dummy"))
    run = made.run(prompts(2), max_tokens=6)
    made.close()
    assert [len(tokens) for tokens in run.tokens.values()] == [6, 6]
