"""What `--batch-invariant` changes and refuses, before weights are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from slipstream.configs.checks import check
from slipstream.configs.options import ConfigError
from slipstream.configs.schema import Config, GraphConfig, ParallelConfig, SpeculativeConfig
from slipstream.kernels.linear.fixed import FixedChooser, tiles_for, unfit_layer
from slipstream.kernels.linear.linear_choice import Fixed, Shape
from slipstream.runner.attention import choice
from slipstream.runner.attention.base import (
    AttentionLayer,
    BuilderSizes,
)
from slipstream.runner.models.formats.weight_format import WeightFormat, resolve_format
from slipstream.runner.models.registry import build_model
from slipstream.runner.startup import batch_invariant
from slipstream.runner.startup.batch_invariant import (
    NotBatchInvariant,
    check_rounding,
    refuse,
    settled,
)
from slipstream.speculators.verification import create_verifier, verify_coupled

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))
SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=64,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip


def sketch(kind: str, **sizes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    config.architectures = [f"{kind}ForCausalLM"]
    return build_model(config, WeightFormat(META, torch.bfloat16))


def test_drafts_are_verified_by_the_targets_own_draws() -> None:
    plain = Config(speculative=SpeculativeConfig("ngram"))
    assert settled(plain) is plain
    invariant = settled(
        Config(graph=GraphConfig(batch_invariant=True), speculative=plain.speculative)
    )
    assert create_verifier(invariant.speculative, CPU) is verify_coupled
    assert invariant.speculative.draft_sampling == "greedy"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, "--tensor-parallel-size 2"),
        (
            {"parallel": ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)},
            "--enable-expert-parallel",
        ),
        ({"graph": {"linear_backend": "torch"}}, "--linear-backend torch"),
        ({"graph": {"attention_backend": "flashinfer"}}, "--attention-backend flashinfer"),
        ({"graph": {"attention_backend": "flash_mla"}}, "--attention-backend flash_mla"),
        (
            {"speculative": SpeculativeConfig("ngram", synthetic_acceptance_rates=(0.5,))},
            "synthetic_acceptance_rates",
        ),
    ],
)
def test_settings_that_break_the_promise_are_refused(changes: dict[str, Any], words: str) -> None:
    graph = GraphConfig(batch_invariant=True, **changes.pop("graph", {}))
    with pytest.raises(ConfigError, match=f"--batch-invariant does not work with {words}"):
        check(Config(graph=graph, **changes))


def test_models_and_formats_without_such_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fmt = resolve_format("float32", CPU, None, "auto", True)
    assert fmt.batch_invariant and not fmt.pack_fp16
    refuse(sketch("Llama"), fmt)
    with pytest.raises(NotBatchInvariant, match="--dtype auto or float32"):
        refuse(sketch("Llama"), WeightFormat(CPU, torch.bfloat16, batch_invariant=True))
    recurrent = type("Qwen3_5Model", (), {})()
    with pytest.raises(
        NotBatchInvariant, match=r"Qwen3_5Model.*operations that depend on other rows"
    ):
        refuse(recurrent, fmt)
    monkeypatch.setattr(batch_invariant, "is_card", lambda device: True)
    fmt = WeightFormat(CUDA, torch.bfloat16, linear=FixedChooser(), batch_invariant=True)
    refuse(sketch("Llama"), fmt)
    with pytest.raises(NotBatchInvariant, match="65 inputs and"):
        refuse(sketch("Llama", intermediate_size=65), fmt)
    with pytest.raises(NotBatchInvariant, match="--dtype bfloat16 or float16"):
        refuse(sketch("Llama"), WeightFormat(CUDA, torch.float32, batch_invariant=True))
    model = SimpleNamespace(format=fmt)
    monkeypatch.setattr(batch_invariant, "check_tiles", lambda *_: None)
    check_rounding(model)
    monkeypatch.setattr(batch_invariant, "check_tiles", lambda *_: "tiles of 16 rows differ")
    with pytest.raises(NotBatchInvariant, match="on this GPU, tiles of 16 rows differ"):
        check_rounding(model)


def test_a_gpu_gets_the_back_end_with_fixed_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    monkeypatch.setattr(choice, "is_card", lambda device: True)
    mla = AttentionLayer(
        layer_id=1, num_heads=4, num_kv_heads=1, head_dim=48, head_dim_v=32, is_mla=True, scale=0.2
    )
    backend = choice.choose_backend("auto", [mla], CPU, True)
    assert (backend.name, backend.batch_invariant) == ("triton", True)
    builder: Any = backend.create_builder([mla], BuilderSizes(16, 4, 32, 128, torch.bfloat16, CPU))
    assert builder._fixed and builder._arrivals is None
    with pytest.raises(choice.UnusableBackend, match="--batch-invariant needs the back end triton"):
        choice.choose_backend("reference", [layer], CPU, True)


@pytest.mark.parametrize("role", ["qkv", "o", "gate_up", "down", "head", "other"])
@pytest.mark.parametrize("inputs", [64, 4096])
def test_no_number_of_rows_splits_or_leaves_a_layer_to_torch(role: str, inputs: int) -> None:
    chooser, shape = FixedChooser(), Shape(role, 4096, inputs)
    for rows in (1, 2, 16, 17, 64, 65, 256, 257, 8192):
        found = chooser.choose(shape, rows)
        assert isinstance(found, Fixed) and found == tiles_for(shape, rows)
        assert found.split_k == 1 and found.norm == 0
    assert unfit_layer([shape]) is None


def test_a_layer_of_uneven_rows_is_named() -> None:
    odd = Shape("down", 64, 65)
    assert unfit_layer([Shape("o", 64, 64), odd]) == odd


def test_the_log_says_what_computes_rows(caplog: pytest.LogCaptureFixture) -> None:
    resolved = SimpleNamespace(quantisation=None, kind="safetensors")
    with caplog.at_level("INFO"):
        batch_invariant.log_changes(WeightFormat(CPU, torch.float32, native=True), resolved)
        batch_invariant.log_changes(WeightFormat(CPU, torch.float32), resolved)
    native, torchs = caplog.messages
    assert "batch invariance is on: native kernels compute every row alone" in native
    assert "one row at a time" in torchs
