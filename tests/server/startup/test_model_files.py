"""Broken downloads and impossible flags are refused from headers alone, each in one sentence."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.configs.load import load_config
from slipstream.configs.schema import Config, ModelConfig, SpeculativeConfig
from slipstream.server.commands import main
from slipstream.server.startup.model_files import ModelFilesError, check_model_files


def config(path: Path, **more: Any) -> Config:
    return Config(model=ModelConfig(model=str(path), **more))


def folder(path: Path, **values: Any) -> Path:
    """A model folder with one safetensors file."""
    path.mkdir(exist_ok=True)
    raw = {"model_type": "llama", "max_position_embeddings": 100, **values}
    (path / "config.json").write_text(json.dumps(raw))
    save_file({"a": np.ones((4, 8), np.float32)}, path / "model.safetensors")
    return path


def gguf_file(
    path: Path, kind: gguf.GGMLQuantizationType | None = None, yarn_factor: float | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(100)
    if yarn_factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn_factor)
        writer.add_rope_scaling_orig_ctx_len(100)
    writer.add_token_list([f"t{number}" for number in range(2000)])
    if kind is None:
        writer.add_tensor("a", np.ones((4, 32), np.float32))
    else:
        data = gguf.quants.quantize(np.ones((4, 256), np.float32), kind)
        writer.add_tensor("a", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_default_model_is_whole_and_read_in_no_time() -> None:
    began = time.monotonic()
    check_model_files(load_config())
    assert time.monotonic() - began < 1.0


def test_whole_files_pass(tmp_path: Path) -> None:
    check_model_files(config(folder(tmp_path / "m"), max_model_len=100))
    Q = gguf.GGMLQuantizationType
    for kind in (None, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.F16, Q.BF16):
        check_model_files(config(gguf_file(tmp_path / "m.gguf", kind), max_model_len=100))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_gguf_file_that_is_cut_anywhere_is_named(tmp_path: Path, quantized: bool) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1 if quantized else None
    whole = gguf_file(tmp_path / "whole.gguf", kind).read_bytes()
    data = whole.rstrip(b"\0") if quantized else whole
    path = tmp_path / "cut.gguf"
    for end in (0, 3, 12, 100, 500, len(whole) // 2, len(data) - 40):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelFilesError, match="cut.gguf is not a readable GGUF file: ") as info:
            check_model_files(config(path))
        assert "Error" not in str(info.value) and "\n" not in str(info.value)


def test_a_gguf_file_of_noise_is_named(tmp_path: Path) -> None:
    whole = bytearray(gguf_file(tmp_path / "whole.gguf").read_bytes())
    path = tmp_path / "noise.gguf"
    chance = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        data = bytearray(whole)
        for place in chance.integers(0, 200, 4):
            data[place] = int(chance.integers(0, 256))
        path.write_bytes(data)
        try:
            check_model_files(config(path))
        except ModelFilesError as error:  # and no other kind of error
            refused += 1
            assert re.search("noise.gguf (is not a readable GGUF|cannot be served)", str(error))
    assert refused > 100


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def header(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(128))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: cut(p, -1), "it has 199 bytes, but its header implies 200"),
        (lambda p: cut(p, 40), "its header is truncated"),
        (lambda p: cut(p, 0), "its header is truncated"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "it has 201 bytes"),
        (lambda p: p.write_bytes(b"<html>404 Not Found</html>"), "its header is truncated"),
        (lambda p: header(p, b"{"), "its header is malformed"),
        (lambda p: header(p, b"[1]"), "its header is malformed"),
        (lambda p: header(p, b'{"a": {"dtype": "F32"}}'), "its header is malformed"),
        (lambda p: header(p, b"[" * 100_000), "its header is malformed"),
        (lambda p: header(p, b"\xff\xfe"), "its header is malformed"),
    ],
)
def test_a_broken_safetensors_file_is_named(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    file = folder(tmp_path / "m") / "model.safetensors"
    check_model_files(config(tmp_path / "m"))
    damage(file)
    with pytest.raises(ModelFilesError, match="model.safetensors is not a readable.*") as info:
        check_model_files(config(tmp_path / "m"))
    assert words in str(info.value)
    check_model_files(config(tmp_path / "m", load_format="dummy"))  # needs no weights


def test_missing_shards_and_broken_indexes_are_named(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ModelFilesError, match="is missing the weight file two.safetensors"):
        check_model_files(config(model))
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        with pytest.raises(ModelFilesError, match="index.json is not"):
            check_model_files(config(model))


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    for text in ("", "{", "[1]", "[" * 100_000):
        (model / "config.json").write_text(text)
        with pytest.raises(ModelFilesError, match="config.json is not"):
            check_model_files(config(model))


def test_a_drafters_files_are_looked_at_too(tmp_path: Path) -> None:
    model, drafter = folder(tmp_path / "m"), folder(tmp_path / "drafter")
    cut(drafter / "model.safetensors", 50)
    both = Config(
        model=ModelConfig(model=str(model)),
        speculative=SpeculativeConfig(method="draft_model", model=str(drafter)),
    )
    with pytest.raises(ModelFilesError, match="drafter/model.safetensors is not"):
        check_model_files(both)


@pytest.mark.parametrize(
    ("values", "overrides", "longest"),
    [
        ({}, None, 100),
        ({"text_config": {"max_position_embeddings": 70}}, None, 70),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, None, 400),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None, 100),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 3.5}},
            '{"rope_parameters": {"original_max_position_embeddings": 80}}',
            280,
        ),
        ({}, '{"max_position_embeddings": 300}', 300),
        (
            {"text_config": {"max_position_embeddings": 70}},
            '{"text_config": {"max_position_embeddings": 80}}',
            80,
        ),
    ],
)
def test_a_length_beyond_the_model_is_refused_from_its_config(
    tmp_path: Path, values: dict[str, Any], overrides: str | None, longest: int
) -> None:
    model = folder(tmp_path / "m", **values)
    check_model_files(config(model, max_model_len=longest, hf_overrides=overrides))
    with pytest.raises(ModelFilesError, match=f"--max-model-len {longest + 1} exceeds"):
        check_model_files(config(model, max_model_len=longest + 1, hf_overrides=overrides))


def test_a_length_beyond_a_gguf_model_is_refused(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf")
    with pytest.raises(ModelFilesError, match="--max-model-len 101 exceeds the model's .* of 100"):
        check_model_files(config(tmp_path, max_model_len=101))
    path = gguf_file(tmp_path / "m.gguf")
    with pytest.raises(ModelFilesError, match="--max-model-len 101 exceeds the model's .* of 100"):
        check_model_files(config(path, max_model_len=101))
    with pytest.raises(ModelFilesError, match="8193 exceeds the model's context length of 8192"):
        check_model_files(load_config({"max_model_len": 8193}))


def test_a_gguf_model_stretched_by_yarn_takes_its_factor_times_the_original(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", yarn_factor=4.0)
    check_model_files(config(path, max_model_len=400))
    with pytest.raises(ModelFilesError, match="--max-model-len 401 exceeds the model's .* of 400"):
        check_model_files(config(path, max_model_len=401))


NOT_SERVED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "architecture GPT2LMHeadModel"),
    (
        {"model_type": "phi"},
        "architecture phi is not supported; supported: DeepseekV2ForCausalLM",
    ),
    (
        {"architectures": ["LlamaForCausalLM"], "model_type": "gpt2"},
        "LlamaForCausalLM of model_type",
    ),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
    ({"architectures": [7]}, "architectures must be a list of names"),
    ({"model_type": None}, "names neither architectures nor a model_type"),
    ({"quantization_config": {"quant_method": "aqlm"}}, "'aqlm' is not supported; supported: fp8,"),
    ({"quantization_config": {"quant_method": ["awq"]}}, r"\['awq'\] is not supported"),
    ({"quantization_config": "awq"}, "quantization_config must be an object, not 'awq'"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
        r"weight_block_size must be two positive integers, not \[128, 0\]",
    ),
]


@pytest.mark.parametrize(("values", "words"), NOT_SERVED)
def test_what_is_not_served_is_refused_by_its_config_alone(
    tmp_path: Path, values: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model on the hub as of a folder: no weights are downloaded or looked at."""
    model = folder(tmp_path / "m", **values)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=f"m cannot be served: .*{words}") as caught:
        check_model_files(config(model))
    assert "\n" not in str(caught.value)
    asked: list[list[str]] = []

    def snapshot(repo: str, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelFilesError, match=f"owner/m cannot be served: .*{words}"):
        check_model_files(Config(model=ModelConfig("owner/m")))
    assert asked == [["config.json"]]


def test_the_file_of_modelopt_is_checked_too(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    stated = model / "hf_quant_config.json"
    stated.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    check_model_files(config(model))
    stated.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelFilesError, match="m cannot be served: .* quant_algo 'W4A8_AWQ'"):
        check_model_files(config(model))


def test_overrides_decide_what_a_config_says(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", model_type="gpt2", architectures=["Odd"])
    check_model_files(
        config(model, hf_overrides='{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    )


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFilesError, match="'falcon' is not supported; supported: deepseek2"):
        check_model_files(config(tmp_path / "m.gguf"))


def test_a_draft_head_may_name_any_architecture_but_a_draft_model_may_not(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    head = folder(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"])

    def both(method: str) -> Config:
        drafts = SpeculativeConfig(method=method, model=str(head))
        return Config(model=ModelConfig(model=str(model)), speculative=drafts)

    check_model_files(both("eagle3"))
    with pytest.raises(ModelFilesError, match="LlamaForCausalLMEagle3 is not supported"):
        check_model_files(both("draft_model"))


def test_the_server_refuses_a_model_before_it_starts_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("slipstream.server.engine.engine_client.Worker.begin", begin)
    model = folder(tmp_path / "m", model_type="phi")
    assert main(["serve", str(model), "--port", "0"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("slipstream serve: error: ") and told.count("\n") == 1
    assert "architecture phi is not supported" in told


def test_mistrals_second_copy_of_the_weights_is_left_alone(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    (model / "model.safetensors").rename(model / "part-1.safetensors")
    (model / "consolidated.safetensors").write_bytes(b"not whole")
    check_model_files(config(model))
