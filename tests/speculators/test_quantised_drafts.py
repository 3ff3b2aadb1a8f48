"""Drafts for quantised targets, by drafters whose own files decide whether they are quantised."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from slipstream.configs.schema import Config, SpeculativeConfig
from slipstream.runner.drafters.exchange import load_other
from slipstream.runner.errors import RunnerError
from slipstream.runner.loading import weights
from slipstream.runner.models.formats import packed
from slipstream.runner.models.formats.expert_stack import ExpertStack
from slipstream.runner.models.formats.packed import Packed, PackedLayer
from slipstream.runner.models.layers import Linear
from slipstream.runner.step import step_timing
from slipstream.runner.step.step_timing import measure_steps

from ..cases import some
from ..runner.loading.quantised.quantised_folder import quantise
from ..runner.loading.quantised.stored_formats import FORMATS
from .all_drafters import Drafters
from .mtp_oracle import LAYERS, MtpOracle
from .test_expert_models import FAMILIES, SHAPE
from .tiny_engine import Run, TinyEngine, prompts

# Matrices of the tiny models whose sizes every format can have.
MATRICES = r"(q|k|v|o|gate|up)_proj\.weight$"


@pytest.fixture(autouse=True)
def keep_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep their formats, as on a GPU."""
    monkeypatch.setattr(weights, "is_card", lambda device: True)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def num_packed(model: object) -> int:
    assert isinstance(model, torch.nn.Module)
    return sum(isinstance(part, Packed) for part in model.modules())


def text_of(engine: TinyEngine, **sampling: object) -> Run:
    run = engine.run(prompts(4, seed=3), max_tokens=17, **sampling)
    engine.close()
    return run


@pytest.mark.parametrize("name", some(FORMATS, ("fp8 blocks", "gptq order")))
def test_greedy_text_does_not_depend_on_drafts(
    name: str, drafters: Drafters, tmp_path: Path
) -> None:
    """A head of plain floats drafts for the quantised target, and so does a copy of the target."""
    target, head = drafters.pair("eagle3")
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    quantise(folder, name, MATRICES)
    alone = TinyEngine(folder, SpeculativeConfig())
    expected = text_of(alone).tokens
    drafted = TinyEngine(folder, drafters.speculative("eagle3"))
    runner = drafted.engine._runner
    assert (
        num_packed(runner.speculator.host.target_model) >= 12
        and num_packed(runner.speculator.model) == 0
    )
    run = text_of(drafted)
    assert run.tokens == expected and run.drafted > 0
    copy = SpeculativeConfig(
        method="draft_model",
        model=str(folder),
        num_speculative_tokens=3,
        draft_sampling="greedy",
    )
    run = text_of(TinyEngine(folder, copy))
    assert run.tokens == expected and run.accepted == run.drafted > 0


def test_the_cost_of_drafts_is_measured_in_the_format_of_the_target(
    drafters: Drafters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start times whole steps of the loaded weights: where the products of a format take time
    for every row, as those of 4 bits do beyond a few rows, K costs more than it does without."""
    target, _ = drafters.pair("eagle3")
    folder, clock = tmp_path / "target", SimpleNamespace(now=0.0)
    shutil.copytree(target, folder)
    quantise(folder, "gptq", MATRICES)
    read = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(step_timing, "time", read)

    def slow(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def multiply(x: torch.Tensor, *args: object) -> torch.Tensor:
            clock.now += 0.001 * x.shape[0]
            return product(x, *args)

        return multiply

    for name in ("packed_linear", "packed_linear_parts", "packed_gated_linear"):
        monkeypatch.setattr(packed, name, slow(getattr(packed, name)))
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, watchdog=False)
    costs = []
    for model in (target, folder):
        engine = TinyEngine(model, speculative)
        found = measure_steps(engine.engine._runner, Config(speculative=speculative))
        products = num_packed(engine.engine._runner._target.model)
        costs.append((found[1, 0], found[1, 3], products))
        engine.close()
    assert costs[0] == (0.0, 0.0, 0)
    one, four, products = costs[1]
    assert products >= 12
    assert one == pytest.approx(0.001 * products) and four == pytest.approx(4 * one)


@pytest.mark.parametrize("name", some(("fp8 blocks", "nvfp4"), ("fp8 blocks",)))
def test_greedy_text_of_quantised_experts_does_not_depend_on_drafts(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SHAPE, **FAMILIES["Qwen3Moe"])
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    quantise(tmp_path, name)
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, watchdog=False)
    engines = [TinyEngine(tmp_path, each) for each in (SpeculativeConfig(), ngram)]
    for engine in engines:
        model = engine.engine._runner._target.model
        stacks = [part for part in model.modules() if isinstance(part, ExpertStack)]
        assert stacks and all(stack.packed is not None for stack in stacks)
    asked = [[token % SHAPE["vocab_size"] for token in ids] for ids in prompts(4, seed=3)]
    runs = [engine.run(asked, max_tokens=16) for engine in engines]
    assert runs[0].tokens == runs[1].tokens and 0 < runs[1].accepted < runs[1].drafted
    for engine in engines:
        engine.close()


def test_a_quantised_head_drafts_for_a_plain_target(drafters: Drafters, tmp_path: Path) -> None:
    target, head = drafters.pair("eagle3")
    assert head is not None
    quantised, plain = tmp_path / "head", tmp_path / "plain"
    for folder in (quantised, plain):
        shutil.copytree(head, folder)
    numbers = quantise(quantised, "int8 channel", MATRICES, size=0.3)
    save_file(numbers, plain / "model.safetensors")
    runs = []
    for folder in (quantised, plain):
        speculative = SpeculativeConfig(
            method="eagle3", model=str(folder), num_speculative_tokens=3, draft_sampling="greedy"
        )
        engine = TinyEngine(target, speculative)
        packed = num_packed(engine.engine._runner.speculator.model)
        assert bool(packed) == (folder == quantised)
        assert num_packed(engine.engine._runner.speculator.host.target_model) == 0
        runs.append(text_of(engine))
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].accepted_per_pos == runs[1].accepted_per_pos


@pytest.mark.parametrize("quantised", some(("target", "module", "both"), ("target", "module")))
def test_a_module_in_the_checkpoint_may_be_quantised_or_not(quantised: str, tmp_path: Path) -> None:
    MtpOracle(tmp_path / "target", hidden_size=64, q_lora_rank=64, v_head_dim=16)
    layers = {"target": "[012]", "module": str(LAYERS), "both": "[0123]"}[quantised]
    pattern = rf"layers\.{layers}\..*(_proj|_mqa)\.weight$"
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "target", plain)
    numbers = quantise(tmp_path / "target", "fp8 channel", pattern)
    save_file(numbers, plain / "model.safetensors")
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=2, draft_sampling="greedy")
    runs = []
    for folder in (tmp_path / "target", plain):
        engine = TinyEngine(folder, speculative)
        runner = engine.engine._runner
        if folder != plain:
            assert bool(num_packed(runner.speculator.host.target_model)) == (quantised != "module")
            assert bool(num_packed(runner.speculator.model)) == (quantised != "target")
        runs.append(text_of(engine))
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].accepted_per_pos == runs[1].accepted_per_pos


def test_quantised_heads_swap_their_weights_in_place(drafters: Drafters, tmp_path: Path) -> None:
    target, head = drafters.pair("eagle3")
    assert head is not None
    folders = [tmp_path / name for name in ("one", "two", "other")]
    for seed, folder in enumerate(folders):
        shutil.copytree(head, folder)
        quantise(folder, "int8 channel" if seed < 2 else "fp8 channel", MATRICES, seed=seed)
    speculative = SpeculativeConfig(
        method="eagle3", model=str(folders[0]), num_speculative_tokens=3, draft_sampling="greedy"
    )
    engine = TinyEngine(target, speculative)
    speculator = engine.engine._runner.speculator
    layer = next(part for part in speculator.model.modules() if isinstance(part, PackedLayer))
    before, x = layer.parts[0].values.clone(), torch.randn(2, 64)
    first = layer.forward(x)
    exchange = load_other(speculator, str(folders[1]))
    exchange.swap()
    assert not torch.equal(layer.parts[0].values, before)
    assert not torch.equal(layer.forward(x), first)
    exchange.swap()
    assert torch.equal(layer.forward(x), first)
    with pytest.raises(RunnerError, match="its format of .* is fp8 in rows, the running one's is"):
        load_other(speculator, str(folders[2]))
    engine.close()
    assert isinstance(speculator.model.layers[0].mlp.down_proj, Linear)
