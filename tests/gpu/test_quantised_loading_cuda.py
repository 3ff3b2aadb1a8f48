"""Quantised checkpoints on a GPU: the numbers of the CPU, and text from whole engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.configs.model.quantisation import parse_quantisation
from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.cpu.formats import STORED_TYPES
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.runner.loading.quantised.delivery import widened
from slipstream.runner.loading.quantised.gguf import packed_rows
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint
from slipstream.runner.models.formats.packed import Packed

from ..kernels.test_cpu_weights import random_rows
from ..runner.loading.quantised.quantised_folder import quantise
from ..runner.loading.quantised.stored_formats import FORMATS
from ..speculators.tiny_engine import TinyEngine, prompts, save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MATRICES = r"(q|k|v|o|gate|up)_proj\.weight$"


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    numbers = quantise(save_llama(tmp_path, layers=2), name, MATRICES)
    said = parse_quantisation({"quantization_config": FORMATS[name].config})
    checkpoint = SafetensorsCheckpoint(tmp_path, said, torch.device("cuda"))
    packed = 0
    for key, weight in checkpoint.tensors():
        assert weight.device.type == "cuda"
        assert torch.equal(widened(weight).cpu(), numbers[key]), key
        packed += isinstance(weight, PackedWeight)
    assert packed == 12


@pytest.mark.parametrize("name", [name for name, t in STORED_TYPES.items() if not t.is_float])
def test_rows_of_gguf_are_those_of_the_cpu(name: str) -> None:
    rows = random_rows(name, 37, 512)
    there, here = (packed_rows(rows, torch.device(kind)) for kind in ("cuda", "cpu"))
    assert isinstance(there, PackedWeight) and isinstance(here, PackedWeight)
    assert torch.equal(there.dequantise().cpu(), here.dequantise())


@pytest.mark.parametrize("name", FORMATS)
def test_engines_write_text_with_graphs_and_drafts(name: str, tmp_path: Path) -> None:
    """A copy of the target is accepted nearly always: rows of a batch may round differently."""
    folder = save_llama(tmp_path, layers=2, heads=2)
    quantise(folder, name, MATRICES)
    copy = SpeculativeConfig(
        method="draft_model", model=str(folder), num_speculative_tokens=3, draft_sampling="greedy"
    )
    for speculative in (SpeculativeConfig(), copy):
        engine = TinyEngine(folder, speculative, device="cuda", dtype="bfloat16")
        run = engine.run(prompts(4), max_tokens=16)
        engine.close()
        assert all(len(tokens) == 16 for tokens in run.tokens.values())
        assert run.accepted >= 0.8 * run.drafted
    target = engine.engine._runner.speculator.host.target_model
    packed = any(isinstance(part, Packed) for part in target.modules())
    assert packed == (name != "gptq 8 bits")  # no kernel knows 8-bit integers with zero points
