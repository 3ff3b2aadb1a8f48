"""Finding models, reading checkpoints, and the sentences users see when that fails."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.configs.schema import Config, ModelConfig
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.dummy import load_random
from slipstream.runner.loading.inspection import ignore
from slipstream.runner.loading.quantised.delivery import widened
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint
from slipstream.runner.loading.weights import load_weights, resolve_model
from slipstream.runner.models.formats.weight_format import WeightFormat, packing_available
from slipstream.runner.models.layers import Linear
from slipstream.runner.models.registry import build_model
from slipstream.runner.startup.load_target import load_target

from ..model_harness import CPU, Sequences, load

CONFIG = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


STORED = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float64,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained(tmp_path)
    return tmp_path


def logits_of(folder: Path | str, **settings: Any) -> torch.Tensor:
    return Sequences(load(folder, **settings), 1, 8).step([(0, [1, 2, 3])])[0][0]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def edit_tensors(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if k != drop} | add
    save_file(tensors, path)


def error_of(folder: Path | str, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **settings)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_a_sharded_checkpoint_loads_like_a_single_file(folder: Path, tmp_path: Path) -> None:
    expected = logits_of(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    shutil.copy(folder / "config.json", sharded)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, sharded / f"part-{number}.safetensors")
        weight_map |= {name: f"part-{number}.safetensors" for name in part}
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(sharded), expected)
    (sharded / "part-1.safetensors").unlink()
    assert "lacks the weight file part-1.safetensors" in error_of(sharded)


def test_the_older_rope_scaling_form_means_the_same(folder: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    plain = logits_of(folder)
    new = {**scaling, "rope_type": "llama3", "rope_theta": 5000.0}
    edit_config(folder, rope_parameters=new)
    expected = logits_of(folder)
    assert not torch.equal(plain, expected)
    old = {**scaling, "type": "llama3"}
    edit_config(folder, rope_parameters=None, rope_scaling=old, rope_theta=5000.0)
    assert torch.equal(logits_of(folder), expected)


@pytest.mark.parametrize("limit", [None, 256])
def test_a_yarn_model_serves_its_factor_times_the_original_length(
    folder: Path, limit: int | None
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    edit_config(folder, rope_parameters=yarn)
    settings = Config(model=ModelConfig(str(folder), max_model_len=limit))
    loaded = load_target(settings, CPU, lambda done, total: None)
    assert loaded.max_model_len == 256
    assert loaded.model.rotary.cos_sin_cache.shape[0] == 256


def test_hf_overrides_are_merged_over_the_config(folder: Path) -> None:
    settings = ModelConfig(
        model=str(folder),
        hf_overrides='{"rope_parameters": {"rope_theta": 77.0}, "bos_token_id": 9}',
    )
    config = resolve_model(settings).hf_config
    assert config.rope_parameters["rope_theta"] == 77.0
    assert config.rope_parameters["rope_type"] == "default" and config.bos_token_id == 9
    assert "not valid JSON" in error_of(folder, hf_overrides="{")


def test_eos_ids_come_from_the_generation_config_first(folder: Path) -> None:
    edit_config(folder, eos_token_id=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert resolve_model(ModelConfig(model=str(folder))).eos_token_ids == [5, 7]
    (folder / "generation_config.json").unlink()
    assert resolve_model(ModelConfig(model=str(folder))).eos_token_ids == [2]


def test_recomputed_tables_in_a_checkpoint_are_ignored(folder: Path) -> None:
    expected = logits_of(folder)
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits_of(folder), expected)


def test_a_tensor_nobody_takes_is_named(folder: Path) -> None:
    edit_tensors(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    assert "unexpected tensors: model.layers.0.self_attn.q_proj.bias" in error_of(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, drop="model.layers.1.mlp.up_proj.weight")
    assert "lacks tensors: model.layers.1.mlp.up_proj.weight" in error_of(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    edit_tensors(folder, **{"model.norm.weight": torch.ones(7)})
    assert "tensor model.norm.weight" in error_of(folder) and "[7]" in error_of(folder)


def test_no_folder_no_config_no_weights_no_architecture(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in error_of(empty)
    assert "is not a folder, a .gguf file or a hub id" in error_of("whatever")
    other = tmp_path / "file.bin"
    other.write_bytes(b"x")
    assert "neither a model folder nor a .gguf file" in error_of(other)
    (tmp_path / "broken.gguf").write_bytes(b"not a gguf file at all")
    assert "not a readable GGUF file" in error_of(tmp_path / "broken.gguf")
    (folder / "model.safetensors").write_bytes(b"junk")
    assert "not a readable safetensors file" in error_of(folder)
    (folder / "model.safetensors").unlink()
    assert "no .safetensors files" in error_of(folder)
    edit_config(folder, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    message = error_of(folder)
    assert "GPT2LMHeadModel is not supported" in message and "LlamaForCausalLM" in message
    edit_config(folder, hidden_size="wide", architectures=["LlamaForCausalLM"], model_type="llama")
    assert "hidden_size must be an integer" in error_of(folder)


def test_a_hub_id_that_is_not_cached_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = error_of("owner/no-such-model-anywhere")
    assert "neither a local folder nor in the download cache, and HF_HUB_OFFLINE is set" in message


def test_other_quantisations_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "aqlm", "bits": 2})
    expected = (
        "quantisation 'aqlm' is not supported; supported: fp8, fbgemm_fp8, compressed-tensors"
    )
    assert expected in error_of(folder)


def shapes(tensors: Iterable[tuple[str, Any]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def test_fp8_blocks_are_dequantised(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"  # [32, 48]: partial blocks of 20 x 20
    tensors = load_file(folder / "model.safetensors")
    scales = torch.rand(2, 3) * 0.01 + 0.01
    spread = scales.repeat_interleave(20, 0)[:32].repeat_interleave(20, 1)[:, :48]
    quantised = (tensors[name] / spread).to(torch.float8_e4m3fn)
    tensors[name] = quantised.float() * spread
    save_file(tensors, folder / "model.safetensors")
    expected = logits_of(folder)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [20, 20]})
    edit_tensors(folder, **{name: quantised, f"{name}_scale_inv": scales})
    torch.testing.assert_close(logits_of(folder), expected)
    said = resolve_model(ModelConfig(model=str(folder))).quantisation
    opened = SafetensorsCheckpoint(folder, said)
    assert {tensor.device.type for _, tensor in opened._read(torch.device("meta"), ignore)} == {
        "meta"
    }
    assert torch.equal(widened(dict(opened._read(CPU, ignore))[name]), tensors[name])
    assert shapes(opened.outlines()) == shapes(opened.tensors())
    edit_tensors(folder, **{f"{name}_scale_inv": scales.to(torch.float8_e8m0fnu)})
    opened.release()
    mapped = widened(dict(opened.tensors())[name])
    assert torch.equal(widened(dict(opened._read(CPU, ignore))[name]), mapped)
    assert not torch.equal(mapped, tensors[name])


def test_reading_gives_what_mapping_gives(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"extra.{i}": torch.arange(5).to(dtype) for i, dtype in enumerate(STORED)}
    tensors |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    opened = SafetensorsCheckpoint(folder, None)
    read = dict(opened._read(CPU, ignore))
    assert sorted(read) == sorted(tensors) and len(list(opened.tensors())) == len(tensors)
    for name, tensor in opened.tensors():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    opened.names = [name for name in opened.names if name.startswith("extra.")]
    assert len(dict(opened._read(CPU, ignore))) == len(STORED)


def test_a_dtype_that_cannot_be_read_is_named_only_where_it_is_wanted(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"odd": torch.zeros(2, dtype=torch.complex64)}, path)
    opened = SafetensorsCheckpoint(folder, None)
    with pytest.raises(ModelLoadError, match="tensor odd .* has the unsupported dtype C64"):
        next(opened._read(CPU, ignore))
    opened.names.remove("odd")
    assert sorted(dict(opened._read(CPU, ignore))) == sorted(opened.names)


def test_what_cannot_be_read_is_one_sentence(folder: Path) -> None:
    opened = SafetensorsCheckpoint(folder, None)
    reading = opened._read(CPU, ignore)
    next(reading)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match="is not a readable safetensors file"):
        next(opened._read(CPU, ignore))
    reading.close()


def test_dummy_weights_need_only_a_config_and_repeat_by_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first = logits_of(folder, load_format="dummy", seed=3)
    assert torch.equal(first, logits_of(folder, load_format="dummy", seed=3))
    assert not torch.equal(first, logits_of(folder, load_format="dummy", seed=4))
    assert first.isfinite().all() and first.std() > 0


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_progress_counts_the_bytes_of_every_tensor(folder: Path, load_format: str) -> None:
    stored = load_file(folder / "model.safetensors")
    resolved = resolve_model(ModelConfig(model=str(folder), load_format=load_format))
    model = build_model(resolved.hf_config, WeightFormat(CPU, torch.float32))
    seen: list[tuple[int, int]] = []
    load_weights(model, resolved, lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in stored.values())
    assert {total for _, total in seen} == {total}
    done = [done for done, _ in seen]
    assert done[0] == 0 and done[-1] == total and done == sorted(set(done))
    assert len(done) > len(stored) // 2  # not one jump


def test_a_model_with_nan_is_loaded_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    spoilt = load_file(folder / "model.safetensors")[name]
    spoilt[3, 4] = float("nan")
    edit_tensors(folder, **{name: spoilt})
    with caplog.at_level(logging.WARNING):
        load(folder)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{folder} holds NaN or infinite weights in {name}: requests may fail with NaN"
    )


@pytest.mark.skipif(not packing_available(), reason="no packed fp16 linear on this machine")
def test_packed_linear_is_fp16_accurate_and_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    fmt = WeightFormat(CPU, torch.float32, pack_fp16=True)
    layer = Linear(40, {"a": 24, "b": 8}, fmt, bias=True)
    slots = dict(layer.checkpoint_slots("x.", "ab"))
    assert list(slots) == ["x.a.weight", "x.a.bias", "x.b.weight", "x.b.bias"]
    tensors = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    x = torch.randn(5, 40)
    weight = torch.cat((tensors["x.a.weight"], tensors["x.b.weight"]))
    bias = torch.cat((tensors["x.a.bias"], tensors["x.b.bias"]))
    for name, slot in slots.items():
        slot.load(tensors[name])
    expected = torch.nn.functional.linear(x, weight.half().float(), bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    assert layer.weight is None
    slots["x.a.weight"].load(torch.full((24, 40), 1e6))  # beyond fp16: kept in fp32, no C++ warning
    slots["x.b.weight"].load(tensors["x.b.weight"])
    assert torch.equal(layer(torch.ones(1, 40))[0, :24], torch.full((24,), 4e7) + bias[:24])
    assert capfd.readouterr().err == ""


def test_random_norms_are_ones_and_biases_zero() -> None:
    config = transformers.Qwen2Config(**CONFIG)
    model = build_model(config, WeightFormat(CPU, torch.float32))
    load_random(model.checkpoint_slots(), CPU, seed=0)
    attention = model.blocks[0].self_attn
    assert torch.equal(model.norm.weight, torch.ones(32))
    assert torch.equal(attention.qkv_proj.bias, torch.zeros(64))
    assert 0.015 < attention.qkv_proj.weight.std() < 0.025
