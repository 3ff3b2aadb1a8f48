"""Reads safetensors checkpoints, whole or sharded. Block-quantised fp8 matrices become fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...configs.model.model_config import OTHER_WEIGHTS, is_file_name
from ..errors import ModelLoadError
from .file_reader import Stretch, read_tensors
from .inspection import BytesRead, ignore, touch

_SCALE = "_scale_inv"  # suffix of the block scales of an fp8 matrix: weight_scale_inv
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class SafetensorsCheckpoint:
    """The weights of a model folder. `names` leaves out the scales of quantised matrices."""

    def __init__(self, folder: Path, hf_config: Any, device: torch.device | None = None) -> None:
        """`device` is where tensors are needed.

        For a GPU, `file_reader` reads them into its memory; otherwise they are views of the
        mapped files.
        """
        self._folder, self._device = folder, device
        self._block = _fp8_block(hf_config)
        self._files = _tensor_files(folder)  # stored name -> file name
        self.names = [name for name in self._files if not self._is_scale(name)]

    def _is_scale(self, name: str) -> bool:
        return name.endswith(_SCALE) and name.removesuffix(_SCALE) in self._files

    def sizes(self) -> dict[str, int]:
        """Bytes of every weight in its stored form."""
        stretches = self._stretches_in_order()
        return {name: stretches[name].num_bytes for name in self.names}

    def release(self) -> None:
        """Files are unmapped once their tensors are gone."""

    def tensors(self, read: BytesRead = ignore) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for every weight, file by file.

        `read` is called with the bytes of each weight as they are read.
        """
        if self._device is not None and self._device.type == "cuda":
            return self._read(self._device, read)
        return self._mapped(read)

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Like `tensors`, but yields meta tensors and reads only headers."""
        stretches = self._stretches_in_order()
        for name in self.names:
            stretch = stretches[name]
            yield name, torch.empty(stretch.shape, dtype=stretch.dtype, device="meta")

    def _mapped(self, read: BytesRead) -> Iterator[tuple[str, Tensor]]:
        opened: dict[str, Any] = {}

        def view(name: str) -> Tensor:
            file = self._files[name]
            try:
                if file not in opened:
                    opened[file] = safe_open(self._folder / file, framework="pt")
                tensor: Tensor = opened[file].get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(
                    f"tensor {name} cannot be read from {self._folder / file}: {error}."
                ) from error
            return tensor

        for name in sorted(self.names, key=lambda name: self._files[name]):
            tensor = view(name)
            touch(tensor.reshape(-1).view(torch.uint8).numpy(), name, read)
            if tensor.dtype in _FP8 and name + _SCALE in self._files:
                tensor = self._dequantised(name, tensor, view(name + _SCALE))
            yield name, tensor

    def _read(self, device: torch.device, read: BytesRead) -> Iterator[tuple[str, Tensor]]:
        """Like `_mapped`, but on the device, in the order of the bytes in the files."""
        wanted = self._stretches_in_order()
        names = list(wanted)

        def count(index: int, num_bytes: int) -> None:
            read(names[index], num_bytes)

        tensors = read_tensors(list(wanted.values()), device, count=count)
        left = iter(wanted)
        for name in left:
            tensor = self._next(tensors, name)
            if wanted[name].dtype in _FP8 and name + _SCALE in wanted:
                tensor = self._dequantised(name, tensor, self._next(tensors, next(left)))
            yield name, tensor

    def _stretches_in_order(self) -> dict[str, Stretch]:
        """The stretches of all weights in file order, each fp8 matrix followed by its scales."""
        scales = {name + _SCALE for name in self.names if name + _SCALE in self._files}
        found: dict[str, Stretch] = {}
        by_file: dict[str, set[str]] = {}
        for name in (*self.names, *scales):
            by_file.setdefault(self._files[name], set()).add(name)
        for file, names in by_file.items():
            found |= _stretches(self._folder / file, names)
        wanted: dict[str, Stretch] = {}
        for name in (*self.names, *scales):
            if name not in found:
                path = self._folder / self._files[name]
                raise ModelLoadError(f"tensor {name} is not in {path}.")
        for name in sorted(self.names, key=lambda name: (found[name].path, found[name].offset)):
            wanted[name] = found[name]
            if found[name].dtype in _FP8 and name + _SCALE in scales:
                wanted[name + _SCALE] = found[name + _SCALE]
        return wanted

    def _dequantised(self, name: str, weight: Tensor, scales: Tensor) -> Tensor:
        expected = [
            -(-size // block) for size, block in zip(weight.shape, self._block, strict=False)
        ]
        if weight.dim() != 2 or list(scales.shape) != expected:
            raise ModelLoadError(
                f"tensor {name} of {self._folder} has shape {list(weight.shape)} in blocks of "
                f"{list(self._block)}, but its scales have shape {list(scales.shape)}."
            )
        return dequantise_blocks(weight, scales, self._block)

    def _next(self, tensors: Iterator[Tensor], name: str) -> Tensor:
        try:
            return next(tensors)
        except OSError as error:
            path = self._folder / self._files[name]
            raise ModelLoadError(f"tensor {name} cannot be read from {path}: {error}.") from error


def _tensor_files(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, LookupError, TypeError, OSError, RecursionError) as error:
            raise ModelLoadError(f"{index} is not a valid safetensors index.") from error
        if not all(is_file_name(file) for file in files.values()):
            raise ModelLoadError(f"{index} is not a valid safetensors index.")
        absent = sorted({file for file in files.values() if not (folder / file).exists()})
        if absent:
            raise ModelLoadError(f"{folder} lacks the weight file {', '.join(absent)}.")
        return files
    found = sorted(folder.glob("*.safetensors"))
    paths = [path for path in found if not path.match(OTHER_WEIGHTS)] or found
    if (folder / "model.safetensors") in paths:
        paths = [folder / "model.safetensors"]
    if not paths:
        raise ModelLoadError(
            f"{folder} has no .safetensors files (use --load-format dummy for random weights)."
        )
    files = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                stored = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is not a readable safetensors file: {error}.") from error
        for name in stored:
            if name in files:
                raise ModelLoadError(f"tensor {name} is in both {files[name]} and {path.name}.")
            files[name] = path.name
    return files


def _stretches(path: Path, names: set[str]) -> dict[str, Stretch]:
    """The places of these tensors in a file."""
    try:
        with safe_open(path, framework="pt"):  # checks the header and the length
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}.") from error
    found = {}
    for name, entry in header.items():
        if name not in names:
            continue
        if entry["dtype"] not in _DTYPES:
            raise ModelLoadError(
                f"tensor {name} of {path} has the unsupported dtype {entry['dtype']}."
            )
        offset = 8 + size + entry["data_offsets"][0]
        found[name] = Stretch(path, offset, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    return found


def _fp8_block(hf_config: Any) -> tuple[int, int]:
    """The block size of an fp8 checkpoint's scales, (rows, columns)."""
    settings = getattr(hf_config, "quantization_config", None) or {}
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    rows, columns = settings.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def dequantise_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantise an fp8 weight [R, C] with block scales [ceil(R/b0), ceil(C/b1)] to fp32."""
    rows, columns = weight.shape
    out = weight.float()
    # full-size scales, cut where the last blocks are partial
    spread = scales.float().repeat_interleave(block[0], 0)[:rows]
    return out.mul_(spread.repeat_interleave(block[1], 1)[:, :columns])
