"""Whatever a config or a header says about quantisation, there is a sentence or a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slipstream.configs.model.model_config import NotServed
from slipstream.configs.model.quantisation import (
    METHODS,
    Quantisation,
    from_modelopt_file,
    parse_quantisation,
)
from slipstream.configs.schema import ModelConfig
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.quantised.parts import Parts
from slipstream.runner.loading.quantised.read import read_matrix
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint
from slipstream.runner.loading.weights import resolve_model

from ....speculators.tiny_engine import save_llama
from .quantised_folder import edit_config, quantise
from .stored_formats import FORMATS

LEAVES = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
USUAL = st.sampled_from([4, 8, "int", "float", "group", "block"])
KEYS = (
    *("bits", "group_size", "sym", "desc_act", "checkpoint_format", "dynamic", "version"),
    *("zero_point", "weight_block_size", "activation_scheme", "modules_to_not_convert", "format"),
    *("config_groups", "ignore", "quant_algo", "exclude_modules", "sparsity_config"),
)
WEIGHTS = ("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure", "actorder")
DTYPES = (
    *(torch.int32, torch.int64, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float8_e8m0fnu, torch.bool),
)
NAMES = ("weight", "weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight_shape",
         "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_scale_2",
         "input_scale", "qzeros", "scales", "g_idx")  # fmt: skip


def is_sentence(error: Exception) -> bool:
    text = str(error)
    return text.endswith(".") and "\n" not in text and len(text) < 600


@given(
    method=st.sampled_from([*METHODS, "bitsandbytes"]) | JSON,
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
    weights=st.none()
    | st.dictionaries(
        st.sampled_from(WEIGHTS), JSON | st.sampled_from([4, 8, "int", "float", "group", "block"])
    ),
    inputs=JSON,
)
def test_fuzzed_configs_are_parsed_or_refused(
    method: object, changes: dict[str, Any], weights: dict[str, Any] | None, inputs: object
) -> None:
    settings = {"quant_method": method, **changes}
    if weights is not None:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        settings["config_groups"] = {"group_0": group}
    for config in (
        {"quantization_config": settings},
        {"text_config": {"quantization_config": settings}},
    ):
        try:
            said = parse_quantisation(config)
        except NotServed as error:
            assert is_sentence(error)
        else:
            assert isinstance(said, Quantisation) and said.method in METHODS
            said.scheme_of("model.layers.0.self_attn.q_proj")


@given(JSON)
def test_fuzzed_files_of_modelopt_are_parsed_or_refused(content: object) -> None:
    try:
        settings = from_modelopt_file({"quantization": content})
        parse_quantisation({"quantization_config": settings})
    except NotServed as error:
        assert is_sentence(error)


@given(
    stored=st.dictionaries(
        st.sampled_from(NAMES),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=4)),
        min_size=1,
    ),
    config=st.sampled_from([None, *(made.config for made in FORMATS.values())]),
    shape=st.lists(st.integers(-5, 200), min_size=2, max_size=2),
)
def test_fuzzed_tensors_are_read_or_refused(
    stored: dict[str, tuple[torch.dtype, list[int]]],
    config: dict[str, Any] | None,
    shape: list[int],
) -> None:
    if not {"weight", "weight_packed", "qweight"} & set(stored):
        return
    said = None if config is None else parse_quantisation({"quantization_config": config})
    for device in ("cpu", "meta"):
        tensors = {
            leaf: torch.zeros(size, dtype=torch.uint8).to(dtype).to(device)
            for leaf, (dtype, size) in stored.items()
        }
        if "weight_shape" in tensors:
            tensors["weight_shape"] = torch.tensor(shape)
        try:
            weight = read_matrix(Parts("a.weight", "a folder", tensors, said))
        except ModelLoadError as error:
            assert is_sentence(error) and "tensor a.weight of a folder" in str(error)
        else:
            assert isinstance(weight, PackedWeight)
            if device == "cpu":
                assert weight.dequantise().shape == weight.shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_llama(path, layers=1)
    quantise(path, "int4 groups", r"(q|k|v|o)_proj\.weight$")
    return path


@given(data=st.data())
def test_fuzzed_headers_of_files_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    """A tensor of a file has another name, shape or type: its outlines exist or a sentence says
    why they cannot."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    name = data.draw(st.sampled_from(names))
    entry = header.pop(name)
    entry["dtype"] = data.draw(st.sampled_from([entry["dtype"], "I32", "F8_E4M3", "BF16", "C64"]))
    entry["shape"] = data.draw(st.just(entry["shape"]) | st.lists(st.integers(0, 70), max_size=3))
    leaf = data.draw(st.sampled_from([*NAMES, name.rpartition(".")[2]]))
    header[f"{name.rpartition('.')[0]}.{leaf}"] = entry
    changed = json.dumps(header).encode()
    other = folder / "changed"
    other.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", other / "config.json")
    content = len(changed).to_bytes(8, "little") + changed + raw[8 + size :]
    (other / "model.safetensors").write_bytes(content)
    try:
        said = resolve_model(ModelConfig(model=str(folder))).quantisation
        checkpoint = SafetensorsCheckpoint(other, said)
        sizes = checkpoint.sizes()
        assert {key for key, _ in checkpoint.outlines()} == set(sizes)
    except ModelLoadError as error:
        assert is_sentence(error)


def test_files_of_modelopt_say_how_weights_are_quantised(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    edit_config(tmp_path / "model", quantization_config=None)
    stated = tmp_path / "model" / "hf_quant_config.json"
    content = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    stated.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": content}))
    said = resolve_model(ModelConfig(model=str(tmp_path / "model"))).quantisation
    assert said is not None and said.method == "modelopt"
    scheme = said.scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None and (scheme.kind, scheme.group) == ("fp4", 16)
    stated.write_text(json.dumps({"quantization": content | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelLoadError, match="quant_algo 'W4A8_AWQ', which is not supported"):
        resolve_model(ModelConfig(model=str(tmp_path / "model")))


W8 = {"num_bits": 8, "strategy": "channel"}
REFUSED = [
    ({"quant_method": "gptq", "bits": 3}, "bits 3, which is not supported; supported: 4, 8"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 1024}, "group_size 1024"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
    (
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
        "compressed-tensors with a transform_config is not supported",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"targets": ["re:("], "weights": W8}},
        },
        "targets has the invalid pattern 're:\\('",
    ),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=str)
def test_what_is_refused_names_what_is_supported(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(NotServed, match=words):
        parse_quantisation({"quantization_config": settings})


def test_spoilt_values_in_a_file_are_refused_when_they_are_read(
    folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("weight_shape"))
    save_file(tensors | {name: torch.tensor([7, -1])}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, None)
    with pytest.raises(ModelLoadError, match="which is not a matrix of shape"):
        dict(checkpoint.outlines())
