"""Model files of impossible contents: each is one sentence, at once, and takes no memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.configs.schema import CacheConfig, Config, ModelConfig
from slipstream.runner.errors import RunnerError
from slipstream.runner.loading.model_check import memory_faults
from slipstream.runner.startup.load_target import load_target
from slipstream.server.text.tokenizer import Tokenizer, TokenizerLoadError

from ..malformed import CPU, bounded, sentences

SHAPE = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("whole")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(model: Path, changes: dict[str, Any], name: str = "config.json") -> None:
    path = model / name
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | changes))


HUGE = 10**9
NUMBERS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, name)
        for name in ("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads")
        for value in (10**12, 0, -1, "2", 2.5, True, [2], float("nan"))
    ),
    ({"num_hidden_layers": HUGE}, "num_hidden_layers must be an integer from 1 to 1024"),
    ({"num_hidden_layers": 500}, "500 layers, but its files hold 21 tensors"),
    ({"num_hidden_layers": 3}, ""),
    ({"num_hidden_layers": 1}, ""),
    ({"vocab_size": 16_000_000}, "16000000 tokens of size 32, but its weights have"),
    ({"vocab_size": 62}, ""),
    ({"hidden_size": 262_144}, "61 tokens of size 262144"),
    ({"hidden_size": 33}, ""),
    ({"intermediate_size": 4_000_000}, ""),
    ({"intermediate_size": HUGE}, "intermediate_size must be an integer"),
    ({"num_attention_heads": 3}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads (3)"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be"),
    ({"head_dim": HUGE}, "head_dim must be an integer"),
    ({"head_dim": 8192}, ""),
    ({"max_position_embeddings": 10**15}, "max_position_embeddings must be"),
    ({"max_position_embeddings": 2**28}, ""),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
        "factor must be a number above 0",
    ),
    ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor must be"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor must be"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
    ({"model_type": ["llama"]}, "model_type must be a name"),
    ({"model_type": {}}, "model_type must be a name"),
    ({"model_type": 5, "architectures": None}, "model_type must be a name"),
    ({"rope_parameters": {"rope_type": "spiral"}}, ""),
    ({"rope_parameters": [1]}, "rope settings must be an object"),
    ({"hidden_act": "relu6"}, ""),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}}, "block_size"),
    ({"eos_token_id": "two"}, "eos_token_id of config.json must be a token id"),
    ({"text_config": 5}, "text_config must be an object"),
]


@pytest.mark.parametrize(("changes", "words"), NUMBERS, ids=str)
def test_a_config_that_no_model_can_have_is_one_sentence(
    model: Path, changes: dict[str, Any], words: str
) -> None:
    """`words` are the server's; without any, only the worker can know."""
    edit(model, changes)
    server, worker = sentences(model)
    assert worker is not None
    assert (server is None) == (words == ""), server
    assert server is None or words in server


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100_000, '{"a":' * 50_000, "\x00", '{"model_type": "llama"}'],
    ids=lambda text: text[:12],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_files_of_broken_json_are_one_sentence(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)
    server, worker = sentences(model)
    assert worker is not None
    assert server is not None or "model_type" in text


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "gone.safetensors"}, "is missing the weight file gone.safetensors"),
        ({"a": "../../secret"}, "is not a valid safetensors index"),
        ({"a": ""}, "is not a valid safetensors index"),
        ({"a": 7}, "is not a valid safetensors index"),
        ({"a": None}, "is not a valid safetensors index"),
        ([1, 2], "is not a valid safetensors index"),
        ({"elsewhere": "model.safetensors"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_an_index_that_leads_astray_is_one_sentence(
    model: Path, weight_map: object, words: str | None
) -> None:
    edit(model, {"weight_map": weight_map}, "model.safetensors.index.json")
    server, worker = sentences(model)
    assert worker is not None and (server is None) == (words is None)
    assert words is None or server is not None and words in server


def _header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


ODD_TENSORS: list[Any] = [
    {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 2**63]},
    {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]},
    {"dtype": "F32", "shape": [4, 4], "data_offsets": [64, 0]},
    {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]},
    {"dtype": "F32", "shape": "x", "data_offsets": [0, 64]},
    {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, float("inf")]},
    {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, float("nan")]},
    {"dtype": "F32", "shape": [4, 4], "data_offsets": None},
    {"dtype": "Q99", "shape": [4, 4], "data_offsets": [0, 64]},
    {"dtype": None, "shape": [4, 4], "data_offsets": [0, 64]},
    {"shape": [4, 4], "data_offsets": [0, 64]},
    {},
    None,
    7,
]


@pytest.mark.parametrize("tensor", ODD_TENSORS, ids=str)
def test_a_safetensors_header_of_odd_tensors_is_one_sentence(model: Path, tensor: Any) -> None:
    (model / "model.safetensors").write_bytes(_header({"model.norm.weight": tensor}))
    _, worker = sentences(model)
    assert worker is not None


def test_weights_of_other_shapes_are_refused_before_memory_is_taken(model: Path) -> None:
    edit(model, {"intermediate_size": 4_000_000})  # a matrix of half a gigabyte, three a layer
    _, worker = sentences(model)
    assert (
        worker is not None and "has shape [32, 48], but the config requires [32, 4000000]" in worker
    )


def test_random_weights_larger_than_the_memory_are_refused(model: Path) -> None:
    sizes = {"hidden_size": 2**17, "intermediate_size": 2**20, "vocab_size": 2**20}
    edit(model, {**sizes, "num_hidden_layers": 64, "head_dim": 64})
    _, worker = sentences(model, load_format="dummy", max_model_len=64)
    assert worker is not None and "the model's weights need" in worker


@pytest.mark.parametrize("eos", ["x", [None], 1e300, [[1]], {"a": 1}, -5, True], ids=str)
def test_an_odd_generation_config_is_one_sentence(model: Path, eos: object) -> None:
    edit(model, {"eos_token_id": eos}, "generation_config.json")
    server, worker = sentences(model)
    assert server is not None and worker is not None
    assert "eos_token_id of generation_config.json must be a token id" in server


# --- memory -----------------------------------------------------------------------------------


def test_a_cache_larger_than_the_memory_is_one_sentence(model: Path) -> None:
    config = Config(
        model=ModelConfig(model=str(model), dtype="float32"),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 50),
    )
    with pytest.raises(
        RunnerError, match="--kv-cache-memory-bytes .* exceeds the memory of .* GiB"
    ):
        load_target(config, CPU, lambda done, total: None)


@pytest.mark.parametrize(
    "exhaust",
    [lambda: np.zeros(1 << 62, np.uint8), lambda: torch.empty(1 << 60, dtype=torch.uint8)],
)
def test_memory_that_is_not_given_is_one_sentence(exhaust: Callable[[], object]) -> None:
    with pytest.raises(RunnerError, match="not enough memory for the KV cache: use a smaller"):
        with memory_faults("the KV cache"):
            exhaust()
    with pytest.raises(RuntimeError, match="something else"), memory_faults("this"):
        raise RuntimeError("something else")


# --- text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("tokenizer.json", text) for text in ("", "{}", "[" * 100_000, '{"model": {}}', "\x00")),
        *(("tokenizer_config.json", text) for text in ("[", "[" * 100_000)),
        ("tokenizer_config.json", '{"chat_template": [3]}'),
        ("tokenizer_config.json", '{"bos_token": 7, "added_tokens_decoder": 3}'),
        ("generation_config.json", "{"),
        ("chat_template.json", "{"),
    ],
    ids=str,
)
def test_malformed_tokenizer_files_are_one_sentence(tmp_path: Path, name: str, text: str) -> None:
    good = {
        "version": "1.0", "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(good))
    Tokenizer.load(str(tmp_path))
    (tmp_path / name).write_text(text)
    with bounded(), pytest.raises(TokenizerLoadError) as caught:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(caught.value)
