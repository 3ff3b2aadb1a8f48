"""GGUF headers of impossible contents: each is one sentence, at once, and takes no memory."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from slipstream.configs.schema import ModelConfig
from slipstream.runner.errors import ModelLoadError
from slipstream.runner.loading.weights import resolve_model

from ..malformed import bounded, sentences


def gguf_file(path: Path, drop: str = "", **changes: Any) -> Path:
    """A header of a tiny Llama with one tensor; `changes` by key behind "llama."."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers: dict[str, Any] = {
        "embedding_length": 32, "feed_forward_length": 48, "block_count": 1,
        "attention.head_count": 4, "attention.head_count_kv": 2, "context_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for key, value in (numbers | changes).items():
        if key == drop:
            continue
        add = {int: writer.add_uint64, float: writer.add_float32, str: writer.add_string}
        add[bool] = writer.add_bool
        name = f"llama.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, int) and value < 0:
            writer.add_int64(name, value)
        else:
            add[type(value)](name, value)
    writer.add_tensor("token_embd.weight", np.ones((61, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize("value", [-1, 2.5, "8", True, [8], 2**40], ids=str)
def test_a_window_that_is_no_length_is_named(tmp_path: Path, value: Any) -> None:
    _, worker = sentences(gguf_file(tmp_path / "m.gguf", **{"attention.sliding_window": value}))
    assert worker is not None and "attention.sliding_window must be a whole number" in worker


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": 10**9}, "num_hidden_layers must be an integer"),
        ({"block_count": 1000}, "1000 layers, but its files hold 1 tensors"),
        ({"block_count": "many"}, "num_hidden_layers must be"),
        ({"embedding_length": 10**12}, "hidden_size must be"),
        ({"embedding_length": -32}, "hidden_size must be"),
        ({"feed_forward_length": 10**14}, "intermediate_size must be"),
        ({"attention.head_count": 0}, "num_attention_heads must be"),
        ({"attention.head_count": 3}, "must be a multiple of"),
        ({"attention.head_count_kv": [2, 2]}, "num_key_value_heads must be"),
        ({"attention.key_length": 10**15}, "head_dim must be"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps must be"),
        ({"rope.freq_base": float("inf")}, "rope_theta must be"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": "x"}, "factor must be"),
        ({"context_length": 2**63}, "max_position_embeddings must be"),
        (YARN | {"rope.scaling.original_context_length": 0}, "original_max_position_embeddings"),
        (YARN | {"rope.scaling.original_context_length": -8}, "original_max_position_embeddings"),
        (YARN | {"rope.scaling.original_context_length": 8.5}, "original_max_position_embeddings"),
        (YARN | {"rope.freq_base": 1.0}, "rope_theta must be above 1 for YaRN"),
    ],
    ids=str,
)
def test_a_gguf_header_that_no_model_can_have_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = gguf_file(tmp_path / "m.gguf", **changes)
    server, worker = sentences(path)
    assert server is not None and words in server
    assert worker is not None and words in worker


@pytest.mark.parametrize(
    "key", ["embedding_length", "block_count", "attention.head_count", "context_length"]
)
def test_a_gguf_header_without_a_number_is_one_sentence(tmp_path: Path, key: str) -> None:
    _, worker = sentences(gguf_file(tmp_path / "m.gguf", drop=key))
    assert worker is not None and f"has no {key}" in worker


def _gguf(counts: tuple[int, int], body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + body


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


KEY = _string("general.architecture")
LLAMA = KEY + struct.pack("<I", 8) + _string("llama")
MALFORMED: list[bytes] = [
    b"",
    b"GGUF",
    _gguf((2**63, 0), b""),
    _gguf((0, 2**63), b""),
    _gguf((0, 1), struct.pack("<Q", 2**63) + b"x"),
    _gguf((0, 1), KEY + struct.pack("<I", 77)),
    _gguf((0, 1), KEY + struct.pack("<IQ", 8, 2**64 - 1)),
    _gguf((0, 1), KEY + struct.pack("<IIQ", 9, 0, 2**60)),
    _gguf((0, 1), KEY + struct.pack("<IIQ", 9, 8, 2**60)),
    _gguf((0, 1), KEY + struct.pack("<IIQ", 9, 99, 5)),
    _gguf((0, 1), KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000),
    _gguf((0, 2), LLAMA + _string("general.alignment") + struct.pack("<Iq", 11, -1)),
    _gguf((0, 2), LLAMA + _string("general.alignment") + struct.pack("<I", 8) + _string("x")),
    _gguf((1, 1), LLAMA + _string("t") + struct.pack("<I", 2**32 - 1)),
    _gguf((1, 1), LLAMA + _string("t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)),
    _gguf((1, 1), LLAMA + _string("t") + struct.pack("<IQIQ", 1, 4, 0, 2**62)),
    _gguf((1, 1), LLAMA + _string("t") + struct.pack("<IQIQ", 1, 4, 9999, 0)),
    _gguf((0, 1), LLAMA),
]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_a_malformed_gguf_file_is_one_sentence(tmp_path: Path, number: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MALFORMED[number] + bytes(64 if number > 12 else 0))
    server, worker = sentences(path)
    assert worker is not None and str(path) in worker
    assert server is not None or number >= len(MALFORMED) - 2


def test_noise_in_a_gguf_header_is_one_sentence_to_the_worker_too(tmp_path: Path) -> None:
    data = gguf_file(tmp_path / "whole.gguf").read_bytes()
    path, chance = tmp_path / "noise.gguf", np.random.default_rng(0)
    refused = 0
    with bounded(seconds=20):
        for _ in range(150):
            noisy = bytearray(data)
            for place in chance.integers(0, 450, 4):
                noisy[place] = int(chance.integers(0, 256))
            path.write_bytes(noisy)
            try:
                resolve_model(ModelConfig(str(path)))
            except ModelLoadError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 75
