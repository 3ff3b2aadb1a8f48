"""Reads safetensors checkpoints, whole or sharded, with quantised matrices in their formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...configs.model.model_config import OTHER_WEIGHTS, is_file_name
from ...configs.model.quantisation import Quantisation
from ..errors import ModelLoadError
from ..parallel.ranks import Cut
from .file_reader import Stretch, parts_of, read_tensors
from .inspection import BytesRead, Stored, ignore, touch
from .matching import WantedParts
from .quantised.parts import Parts, group_names
from .quantised.read import read_matrix
from .quantised.shards import ORDERS, is_in_order, leaf_cuts, num_groups

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
        # The parts of weights that are wanted, by stored name; None: the whole tensor.
        self._parts: dict[str, dict[str, Cut | None]] = {}
        self._part_shapes: dict[str, tuple[int, ...]] = {}  # by name
        # the scales of the KV cache, which `kv_scales` reads: stored name -> file name
        self.cache_scales = {name: self._files[name] for name in found.cache_scales}

    @property
    def is_quantised(self) -> bool:
        """Whether any of `names` is a quantised matrix."""
        return any(name in self._quantised for name in self.names)

    def sizes(self) -> dict[str, int]:
        """Bytes of every weight in its stored form, or of the part that is wanted."""
        stretches = self._stretches()
        return {
            name: sum(
                math.prod(self._shape(name, stored, stretches[stored]))
                * stretches[stored].dtype.itemsize
                for stored in self._stored(name)
            )
            for name in self.names
        }

    def keep_parts(self, parts: WantedParts) -> None:
        """Let `tensors` read and yield only these parts, and leave out parts of no size.

        A quantised matrix is read whole, and yielded so, if its stored tensors cannot be cut there.
        """
        self._parts, self._part_shapes = {}, {}
        stretches = self._stretches() if parts else {}
        for name, (shape, cut) in parts.items():
            group = self._quantised.get(name)
            if group is None or not cut.size:
                self._parts[name] = dict.fromkeys(self._stored(name), cut)
                continue
            shapes = {leaf: stretches[stored].shape for leaf, stored in group.items()}
            found = leaf_cuts(shape, cut, shapes, self._quantisation)
            if found is None:
                continue
            for leaf in [leaf for leaf in found if leaf in ORDERS and cut.dim]:
                if not is_in_order(self._view(group[leaf]), num_groups(shapes)):
                    break
                del found[leaf]  # of sorted columns it says nothing
            else:
                self._parts[name] = {group[leaf]: own for leaf, own in found.items()}
                self._part_shapes[name] = cut.shape_of(shape)

    @property
    def _wanted(self) -> list[str]:
        return [name for name in self.names if not self._is_absent(name)]

    def _is_absent(self, name: str) -> bool:
        cuts = self._parts.get(name, {}).values()
        return any(cut is not None and not cut.size for cut in cuts)

    def _shape(self, name: str, stored: str, stretch: Stretch) -> tuple[int, ...]:
        """The shape of what is wanted of a stored tensor."""
        cut = self._parts.get(name, {}).get(stored)
        return stretch.shape if cut is None else cut.shape_of(stretch.shape)

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
        if group is None:
            return [name]
        return [stored for stored in group.values() if stored in self._parts.get(name, {stored})]

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
        leaves = {stored: leaf for leaf, stored in group.items()}
        parts = {
            leaves[stored]: tensor
            for stored, tensor in zip(self._stored(name), tensors, strict=True)
        }
        if "weight_shape" in group:  # read in any case, as no other tensor says what it says
            shape = self._part_shapes.get(name)
            whole = self._view(group["weight_shape"])
            parts["weight_shape"] = whole if shape is None else torch.tensor(shape)
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
        for name in sorted(self._wanted, key=lambda name: self._files[self._stored(name)[0]]):
            cuts, tensors = self._parts.get(name, {}), []
            for stored in self._stored(name):
                tensor, cut = self._view(stored), cuts.get(stored)
                if cut is not None:
                    tensor = cut.of(tensor)
                if tensor.is_contiguous():
                    touch(tensor.reshape(-1).view(torch.uint8).numpy(), name, read)
                else:
                    tensor = tensor.contiguous()
                    read(name, tensor.nbytes)
                tensors.append(tensor)
            yield name, self._weight(name, tensors)

    def _read(self, device: torch.device, read: BytesRead) -> Iterator[tuple[str, Stored]]:
        """Like `_mapped`, but on the device, in the order of the bytes in the files."""
        stretches = self._stretches()

        def place(name: str) -> tuple[Path, int]:
            return min((stretches[s].path, stretches[s].offset) for s in self._stored(name))

        names = sorted(self._wanted, key=place)
        plans = {
            stored: _planned(stretches[stored], self._parts.get(name, {}).get(stored))
            for name in names
            for stored in self._stored(name)
        }
        wanted = [
            (name, stretch)
            for name in names
            for stored in self._stored(name)
            for stretch in plans[stored][0]
        ]

        def count(index: int, num_bytes: int) -> None:
            read(wanted[index][0], num_bytes)

        tensors = read_tensors([stretch for _, stretch in wanted], device, count=count)
        for name in names:
            found = []
            for stored in self._stored(name):
                parts, join = plans[stored]
                found.append(join([self._next(tensors, stored) for _ in parts]))
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


def _planned(
    stretch: Stretch, cut: Cut | None
) -> tuple[list[Stretch], Callable[[list[Tensor]], Tensor]]:
    """What to read for a part of a tensor, and what makes the part of it."""
    if cut is None:
        return [stretch], lambda read: read[0]
    parts = parts_of(stretch, cut)
    if parts is None:
        return [stretch], lambda read: cut.of(read[0]).contiguous()
    return parts, lambda read: read[0] if len(read) == 1 else torch.cat(read, cut.dim)


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
