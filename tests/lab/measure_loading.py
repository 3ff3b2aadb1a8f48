"""Measures how fast safetensors files are loaded onto the GPU, compared with disk and bus.

    PYTHONPATH=.src python tests/lab/measure_loading.py MODEL [--layers 4] [--folders LIST]

MODEL is a folder from `shapes.py`. Its embeddings, head and first layers are written as random bf16
weights to two files in each of the folders, and loaded as a worker loads them. The default folders
are the temporary folder, and /dev/shm, which is memory. The figures are GB/s of the files' bytes:

* bus: copies from pinned memory to the GPU, without files
* read: the files are read into memory, by one thread and by eight
* mapped: loaded from memory-mapped files, as a worker does on a CPU
* loaded: loaded as a worker does on a GPU

For "cold", the files are first dropped from the page cache, which has no effect on /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.configs.schema import ModelConfig
from slipstream.runner.loading.safetensors_weights import SafetensorsCheckpoint
from slipstream.runner.loading.weights import load_checkpoint, load_weights, resolve_model
from slipstream.runner.models.base import TextModel
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.registry import build_model

PIECE = 8 << 20


def write(model: Path, layers: int, folder: Path, device: torch.device) -> None:
    """Write a checkpoint of `layers` layers with random weights to two files in `folder`."""
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    resolved = resolve_model(ModelConfig(model=str(folder), load_format="dummy"))
    slots = build_model(
        resolved.hf_config, WeightFormat(torch.device("meta"), torch.bfloat16)
    ).checkpoint_slots()
    names, weight_map = sorted(slots), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{number}.safetensors"
        tensors = {
            f"{name}": torch.randn(slots[name].shape, device=device, dtype=torch.bfloat16)
            for name in part
        }
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as opened:
            os.fsync(opened.fileno())


def drop(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path, num_threads: int) -> None:
    """Read all bytes of the files into pageable memory."""
    jobs = [
        (path, at)
        for path in sorted(folder.glob("*.safetensors"))
        for at in range(0, path.stat().st_size, PIECE)
    ]
    files = {path: os.open(path, os.O_RDONLY) for path, _ in jobs}

    def some(which: int) -> None:
        buffer = bytearray(PIECE)
        for path, at in jobs[which::num_threads]:
            assert os.preadv(files[path], [buffer], at)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(some, range(num_threads)))
    for file in files.values():
        os.close(file)


def bus(device: torch.device, size: int = 256 << 20) -> float:
    """Measure copies from pinned memory to the GPU, in GB/s; NaN without a GPU."""
    if device.type != "cuda":
        return float("nan")
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * size / (time.perf_counter() - began) / 1e9


def load(folder: Path, device: torch.device, mapped: bool) -> TextModel:
    """Load the model in `folder`, as on a CPU if `mapped`, else as on a GPU."""
    resolved = resolve_model(ModelConfig(model=str(folder)))
    model = build_model(resolved.hf_config, WeightFormat(device, torch.bfloat16))
    if mapped:
        checkpoint = SafetensorsCheckpoint(folder, resolved.quantisation)
        slots = model.checkpoint_slots()
        load_checkpoint(slots, checkpoint, model.checkpoint_name, str(folder))
    else:
        load_weights(model, resolved)
    return model


def measure(folder: Path, device: torch.device) -> None:
    """Print all figures of a folder; checks that both ways of loading yield equal weights."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    kept: dict[bool, dict[str, Tensor]] = {}

    def timed(run: Callable[[], object]) -> str:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return f"{size / (time.perf_counter() - began) / 1e9:>8.2f}"

    def loaded(mapped: bool) -> None:
        kept[mapped] = dict(load(folder, device, mapped).named_buffers())

    figures = {}
    for state in ("cold", "cached"):
        for name, run in (
            ("read by 1", lambda: read(folder, 1)),
            ("read by 8", lambda: read(folder, 8)),
            ("mapped", lambda: loaded(True)),
            ("loaded", lambda: loaded(False)),
        ):
            if state == "cold":
                drop(folder)
            figures[f"{name}, {state}"] = timed(run)
    assert all(torch.equal(kept[True][name], tensor) for name, tensor in kept[False].items())
    for name, figure in figures.items():
        print(f"  {name:<18}{figure} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folders", default=f"{tempfile.gettempdir()},/dev/shm")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.empty(1, device=device).numel()  # creates the CUDA context
    print(f"bus: {bus(device):.1f} GB/s; {os.cpu_count()} cores")
    for parent in args.folders.split(","):
        began = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="measure-loading-", dir=parent))
        try:
            write(args.model, args.layers, folder, device)
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            written = time.perf_counter() - began
            print(f"{parent}: {size / 1e9:.2f} GB, written in {written:.1f} s", flush=True)
            measure(folder, device)
        finally:
            shutil.rmtree(folder)
        print(f"  {time.perf_counter() - began:.1f} s in total", flush=True)


if __name__ == "__main__":
    main()
