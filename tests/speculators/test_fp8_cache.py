"""An fp8 KV cache under the whole engine: drafts, prefix hits, chunks and preemption change no
text, and a checkpoint's scales are used only if the flag asks for them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.scheduling.scheduler import Scheduler

from ..cases import some
from .all_drafters import METHODS, Drafters
from .tiny_engine import Run, TinyEngine, prompts, save_llama

OFF = SpeculativeConfig()
FP8 = {"kv_cache_dtype": "fp8"}
TOKENS = 12


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def texts(model: Path, config: SpeculativeConfig, **changes: Any) -> Run:
    engine = TinyEngine(model, config, **changes)
    try:
        for group in layers_of(engine):
            assert group.fp8 is not None
        return engine.run([*prompts(5, seed=2), [7, 8, 9] * 6], max_tokens=16)
    finally:
        engine.close()


def layers_of(engine: TinyEngine) -> list[Any]:
    runner: Any = engine.engine._runner
    return list(runner._target.cache.layers.values())


@pytest.mark.parametrize("method", some([*METHODS, "ngram"], ["ngram", "eagle3", "mtp"]))
def test_drafts_change_no_text(method: str, drafters: Drafters) -> None:
    if method == "ngram":
        target = drafters.pair("eagle3")[0]
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    else:
        target, config = drafters.pair(method)[0], drafters.speculative(method)
    with_drafts = texts(target, config, cache=dict(FP8))
    assert with_drafts.drafted > with_drafts.accepted
    assert with_drafts.accepted > 0 or method == "eagle"  # whose head is random
    assert with_drafts.tokens == texts(target, OFF, cache=dict(FP8)).tokens


def test_a_copy_of_the_target_is_accepted_at_every_position(drafters: Drafters) -> None:
    """So the drafter's own cache is as the target's, whose scales are 1 as well."""
    target = drafters.pair("eagle3")[0]
    config = SpeculativeConfig(
        method="draft_model", model=str(target), num_speculative_tokens=3, draft_sampling="greedy"
    )
    engine = TinyEngine(target, config, cache=dict(FP8))
    run = engine.run(prompts(3, seed=6), max_tokens=17)  # the first token, and 4 in each step
    layers = layers_of(engine)
    engine.close()
    assert all(layer.fp8 == Fp8Cache(torch.float32) for layer in layers) and len(layers) == 8
    assert run.drafted == run.accepted > 20


@pytest.mark.parametrize("latent", some([False, True], [False]))
def test_chunks_prefix_hits_and_preemption_change_no_text(
    latent: bool, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = drafters.pair("mtp" if latent else "eagle3")[0]
    shared = prompts(1, seed=4, longest=50)[0] + list(range(24))
    asked = [shared + [1, 2], shared + [5], *prompts(3, seed=9)]
    alone = TinyEngine(target, OFF, cache=FP8 | {"enable_prefix_caching": False})
    expected = [alone.run([prompt], max_tokens=TOKENS).tokens["0"] for prompt in asked]
    alone.close()
    engine = TinyEngine(target, OFF, cache=dict(FP8), scheduler={"max_num_batched_tokens": 17})
    first = engine.run([shared], max_tokens=1)
    hits = engine.run(asked, max_tokens=TOKENS)
    engine.close()
    assert first.cached_tokens["0"] == 0 and hits.cached_tokens["0"] >= len(shared) - 4
    assert [hits.tokens[str(index)] for index in range(5)] == expected
    victims: list[Any] = []
    preempt = Scheduler._preempt

    def counted(self: Scheduler, request: Any) -> None:
        victims.append(request)
        preempt(self, request)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    small = TinyEngine(target, OFF, cache=FP8 | {"num_gpu_blocks_override": 34})
    preempted = small.run(asked, max_tokens=TOKENS)
    small.close()
    assert victims
    assert [preempted.tokens[str(index)] for index in range(5)] == expected


def with_scales(folder: Path, names: tuple[str, ...] = ("k_scale", "v_scale")) -> Path:
    """A tiny Llama with a scale of keys and of values in each layer."""
    save_llama(folder, layers=2)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for name, scale in zip(names, (0.5 + layer, 0.03125), strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_of_the_checkpoint_are_used(tmp_path: Path, names: tuple[str, ...]) -> None:
    engine = TinyEngine(with_scales(tmp_path, names), OFF, cache=dict(FP8))
    engine.run(prompts(1), max_tokens=3)
    layers = layers_of(engine)
    engine.close()
    assert [layer.fp8 for layer in layers] == [
        Fp8Cache(torch.float32, 0.5, 0.03125),
        Fp8Cache(torch.float32, 1.5, 0.03125),
    ]


def test_without_the_flag_scales_are_ignored_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = TinyEngine(save_llama(tmp_path / "plain", layers=2), OFF)
    expected = plain.run(prompts(2), max_tokens=8).tokens
    plain.close()
    with caplog.at_level(logging.INFO):
        engine = TinyEngine(with_scales(tmp_path / "scaled"), OFF)
    assert [layer.fp8 for layer in layers_of(engine)] == [None, None]
    assert engine.run(prompts(2), max_tokens=8).tokens == expected
    engine.close()
    assert caplog.text.count("they are not used with --kv-cache-dtype auto") == 1


@pytest.mark.parametrize(
    ("settings", "is_used"),
    [
        (
            {
                "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            },
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
                "kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"},
            },
            False,
        ),
        (
            {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
            True,
        ),
        (
            {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"},
            False,
        ),
    ],
)  # fmt: skip
def test_the_config_says_for_which_format_the_scales_are(
    tmp_path: Path, settings: dict[str, Any], is_used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_scales(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        engine = TinyEngine(folder, OFF, cache=dict(FP8))
    scales = [layer.fp8.k_scale for layer in layers_of(engine)]
    engine.close()
    assert scales == ([0.5, 1.5] if is_used else [1.0, 1.0])
    assert ("not for fp8: scale 1 is used" in caplog.text) is not is_used


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (torch.tensor(-1.0), "must be positive"),
        (torch.tensor(float("nan")), "must be positive"),
        (torch.ones(2), r"shape \[2\]: the KV cache supports one scale per layer"),
    ],
)
def test_bad_scales_are_refused_before_weights_are_loaded(
    tmp_path: Path, scale: torch.Tensor, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_scales(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr("slipstream.runner.startup.load_target.load_weights", None)
    with pytest.raises(ModelLoadError, match=words):
        TinyEngine(folder, OFF, cache=dict(FP8))


def test_the_log_says_what_the_format_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = save_llama(tmp_path, layers=2)
    with caplog.at_level(logging.INFO):
        TinyEngine(target, OFF, cache=FP8 | {"num_gpu_blocks_override": 101}).close()
    # 2 layers, 2 key heads of 8 values, keys and values; 101 blocks of 4 tokens, one of them null
    line = "KV cache in fp8_e4m3: 64 bytes per token instead of 256 in float32; 400 tokens fit"
    assert f"{line} instead of 96" in caplog.text
