"""Reads safetensors checkpoints, whole or sharded, with quantised matrices in their formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...configs.model.model_config import OTHER_WEIGHTS, is_file_name
from ...configs.model.quantisation import Quantisation
from ..errors import ModelLoadError
from ..parallel.ranks import Cut
from .file_reader import Stretch, read_tensors
from .inspection import BytesRead, Stored, ignore, touch
from .quantised.parts import Parts, group_names
from .quantised.read import read_matrix

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class SafetensorsCheckpoint:
    """The weights of a model folder. `names` has one name for a quantised matrix and its scales."""

    def __init__(
        self, folder: Path, quantisation: Quantisation | None, device: torch.device | None = None
    ) -> None:
        """`quantisation` is what the config says. `device` is where tensors are needed.

        For a GPU, `file_reader` reads them into its memory; otherwise they are views of the
        mapped files.
        """
        self._folder, self._device, self._quantisation = folder, device, quantisation
        self._files = _tensor_files(folder)  # stored name -> file name
        self._opened: dict[str, Any] = {}  # file name -> mapped file
        found = group_names(self._files)
        self.names, self.spare, self._quantised = found.names, found.spare, found.quantised
        self._cuts: Mapping[str, Cut] = {}  # the parts of tensors that are wanted
        # the scales of the KV cache, which `kv_scales` reads: stored name -> file name
        self.cache_scales = {name: self._files[name] for name in found.cache_scales}

    @property
    def is_quantised(self) -> bool:
        """Whether any of `names` is a quantised matrix."""
        return any(name in self._quantised for name in self.names)

    def sizes(self) -> dict[str, int]:
        """Bytes of every weight in its stored form."""
        stretches = self._stretches()
        return {
            name: sum(stretches[stored].num_bytes for stored in self._stored(name))
            for name in self.names
        }

    def keep_parts(self, cuts: Mapping[str, Cut]) -> None:
        """Let `tensors` yield only these parts of float tensors.

        Of rows, other parts are not read. Of columns, a GPU reads all and keeps a part.
        """
        self._cuts = {name: cut for name, cut in cuts.items() if name not in self._quantised}

    def release(self) -> None:
        """Files are unmapped once their tensors are gone."""
        self._opened.clear()

    def tensors(self, read: BytesRead = ignore) -> Iterator[tuple[str, Stored]]:
        """Yield (name, weight) for every weight, file by file.

        `read` is called with the bytes of each weight as they are read.
        """
        if self._device is not None and self._device.type == "cuda":
            return self._read(self._device, read)
        return self._mapped(read)

    def outlines(self) -> Iterator[tuple[str, Stored]]:
        """Like `tensors`, but yields meta tensors and reads only headers."""
        stretches = self._stretches()

        def outline(stored: str) -> Tensor:
            stretch = stretches[stored]
            return torch.empty(stretch.shape, dtype=stretch.dtype, device="meta")

        for name in self.names:
            yield name, self._weight(name, [outline(stored) for stored in self._stored(name)])

    def _stored(self, name: str) -> list[str]:
        """The names in the file of what `name` is made of."""
        group = self._quantised.get(name)
        return [name] if group is None else [*group.values()]

    def _weight(self, name: str, tensors: list[Tensor]) -> Stored:
        """The weight `name`, made of its stored tensors in the order of `_stored`."""
        group, source = self._quantised.get(name), str(self._folder)
        if group is None:
            tensor = tensors[0]
            if tensor.dtype in _FP8 and name.endswith(".weight"):
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ModelLoadError(
                    f"tensor {name} of {source} is {kind}, but the file has no {name}_scale or "
                    f"{name}_scale_inv."
                )
            return tensor
        parts = dict(zip(group, tensors, strict=True))
        if "weight_shape" in group:  # read in any case, as no other tensor says what it says
            parts["weight_shape"] = self._view(group["weight_shape"])
        return read_matrix(Parts(name, source, parts, self._quantisation))

    def _view(self, stored: str) -> Tensor:
        """A stored tensor in the mapped file."""
        file = self._files[stored]
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self._folder / file, framework="pt")
            tensor: Tensor = self._opened[file].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"tensor {stored} cannot be read from {self._folder / file}: {error}."
            ) from error
        return tensor

    def _mapped(self, read: BytesRead) -> Iterator[tuple[str, Stored]]:
        for name in sorted(self.names, key=lambda name: self._files[self._stored(name)[0]]):
            tensors = [self._view(stored) for stored in self._stored(name)]
            cut = self._cuts.get(name)
            if cut is not None:
                tensors = [cut.of(tensor) for tensor in tensors]
            for tensor in tensors:
                if tensor.is_contiguous():  # others are read as they are copied
                    touch(tensor.reshape(-1).view(torch.uint8).numpy(), name, read)
            yield name, self._weight(name, tensors)

    def _read(self, device: torch.device, read: BytesRead) -> Iterator[tuple[str, Stored]]:
        """Like `_mapped`, but on the device, in the order of the bytes in the files."""
        stretches = self._stretches()

        def place(name: str) -> tuple[Path, int]:
            return min((stretches[s].path, stretches[s].offset) for s in self._stored(name))

        names = sorted(self.names, key=place)
        wanted = [(name, stretches[stored]) for name in names for stored in self._stored(name)]
        wanted = [(name, _rows(stretch, self._cuts.get(name))) for name, stretch in wanted]

        def count(index: int, num_bytes: int) -> None:
            read(wanted[index][0], num_bytes)

        tensors = read_tensors([stretch for _, stretch in wanted], device, count=count)
        for name in names:
            found = [self._next(tensors, stored) for stored in self._stored(name)]
            cut = self._cuts.get(name)
            if cut is not None and cut.dim:
                found = [cut.of(tensor) for tensor in found]
            yield name, self._weight(name, found)

    def _stretches(self) -> dict[str, Stretch]:
        """The places of all stored tensors that are wanted."""
        by_file: dict[str, set[str]] = {}
        for name in self.names:
            for stored in self._stored(name):
                by_file.setdefault(self._files[stored], set()).add(stored)
        found: dict[str, Stretch] = {}
        for file, names in by_file.items():
            found |= _stretches(self._folder / file, names)
            for name in names:
                if name not in found:
                    raise ModelLoadError(f"tensor {name} is not in {self._folder / file}.")
        return found

    def _next(self, tensors: Iterator[Tensor], name: str) -> Tensor:
        try:
            return next(tensors)
        except OSError as error:
            path = self._folder / self._files[name]
            raise ModelLoadError(f"tensor {name} cannot be read from {path}: {error}.") from error


def _rows(stretch: Stretch, cut: Cut | None) -> Stretch:
    """The rows of a stretch that a cut keeps; all of them if it cuts columns."""
    if cut is None or cut.dim:
        return stretch
    row = stretch.num_bytes // stretch.shape[0] if stretch.shape[0] else 0
    at = stretch.offset + cut.start * row
    return replace(stretch, offset=at, shape=cut.shape_of(stretch.shape))


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
