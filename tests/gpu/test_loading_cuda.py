"""Weights are loaded onto the GPU correctly while other work uses its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_tensors_are_loaded_correctly_while_the_gpu_is_busy(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(4096, 1000 + 700 * index) for index in range(12)] + [(0, 3), (5,)]
    tensors = {
        f"t.{index}": torch.randint(-99, 99, size, generator=generator, dtype=torch.int16)
        for index, size in enumerate(sizes)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    busy = torch.randn(4096, 4096, device="cuda")
    kept = {}
    for name, tensor in SafetensorsCheckpoint(tmp_path, None, torch.device("cuda")).tensors():
        for _ in range(20):  # the copy waits for these; its source is freed before it runs
            busy = (busy @ busy).clamp(-1, 1)
        kept[name] = torch.empty_like(tensor).copy_(tensor)
        del tensor
    assert kept.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert all(torch.equal(kept[name].cpu(), tensor) for name, tensor in tensors.items())
