"""The stored tensors of a quantised matrix: which of a checkpoint's tensors belong together, and
whether their types and shapes can be true."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....configs.model.quantisation import GROUPS, Quantisation, Scheme
from ...errors import ModelLoadError

_MATRICES = ("weight_packed", "qweight", "weight")  # what holds the numbers, the surest name first
_SCALES = ("weight_scale", "weight_scale_inv")  # one of them makes a `weight` quantised
_PLAIN_SCALE = "scale"  # DeepSeek V4's name of a weight_scale_inv
_OTHERS = (
    *("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    *("weight_scale_2", "input_scale", "input_global_scale", "input_scale_ub"),
    *("input_zero_point", "qzeros", "scales", "g_idx"),
)
_CACHE_SCALE = re.compile(r"\.(?:k|v|q|kv|prob|output)_(?:scale|zero_point)$")


@dataclass(frozen=True)
class Grouping:
    """What a checkpoint's names say: its matrices and vectors, and which stored tensors they are
    made of."""

    names: list[str]  # of plain tensors, and `<module>.weight` of quantised matrices
    quantised: dict[str, dict[str, str]]  # such a name -> last part of a name -> stored name
    spare: frozenset[str]  # plain tensors that a model may have no use for
    cache_scales: list[str]  # stored names of scales of the KV cache, for `kv_scales`


def group_names(stored: Iterable[str]) -> Grouping:
    """Group the tensors of a checkpoint by the matrix that they describe, by their names alone."""
    modules: dict[str, dict[str, str]] = {}
    cache_scales = []
    for name in stored:
        if _CACHE_SCALE.search(name):
            cache_scales.append(name)
            continue
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = name
    for leaves in modules.values():
        if "weight" in leaves and _PLAIN_SCALE in leaves:
            leaves["weight_scale_inv"] = leaves.pop(_PLAIN_SCALE)
    names, quantised, spare = [], {}, set()
    for module, leaves in modules.items():
        matrix = next((leaf for leaf in _MATRICES if leaf in leaves), None)
        used: set[str] = set()
        if matrix is not None and (matrix != "weight" or any(s in leaves for s in _SCALES)):
            used = {leaf for leaf in leaves if leaf == matrix or leaf in (*_SCALES, *_OTHERS)}
            names.append(f"{module}.weight")
            quantised[f"{module}.weight"] = {leaf: leaves[leaf] for leaf in leaves if leaf in used}
            if matrix == "qweight" and "bias" in leaves:
                spare.add(f"{module}.bias")  # GPTQ writes zeros where the model has none
        elif matrix is not None:
            used = {leaf for leaf in leaves if leaf.startswith("input_")}
        names += [leaves[leaf] for leaf in leaves if leaf not in used]
    return Grouping(names, quantised, frozenset(spare), cache_scales)


@dataclass(frozen=True)
class Parts:
    """The stored tensors of one quantised matrix, by the last part of their names.

    They may be meta tensors, which have no values, except for `weight_shape`.
    """

    name: str  # `<module>.weight`
    source: str  # the checkpoint, for errors
    tensors: dict[str, Tensor]
    quantisation: Quantisation | None = None  # what the config says

    def __contains__(self, leaf: object) -> bool:
        return leaf in self.tensors

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def scheme(self) -> Scheme | None:
        """What the config says about this matrix."""
        return None if self.quantisation is None else self.quantisation.scheme_of(self.module)

    @property
    def activations(self) -> str:
        """How the config wants activations to be rounded."""
        return "16bit" if self.scheme is None else self.scheme.activations

    def take(
        self,
        leaf: str,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | None, ...] | None = None,
    ) -> Tensor:
        """The tensor `leaf`; ModelLoadError unless it is there with one of these types and this
        shape. None in a shape stands for any size."""
        tensor = self.tensors.get(leaf)
        if tensor is None:
            raise self.wrong(f"has no {leaf}")
        if tensor.dtype not in dtypes:
            raise self.wrong(f"has a {leaf} of {_plain(tensor.dtype)}, not {_listed(dtypes)}")
        fits = shape is None or (
            tensor.dim() == len(shape)
            and all(
                wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
            )
        )
        if not fits:
            assert shape is not None
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.wrong(f"has a {leaf} of shape {list(tensor.shape)}, not [{wanted}]")
        if 0 in tensor.shape:
            raise self.wrong(f"has an empty {leaf}")
        return tensor

    def group(self, columns: int, count: int) -> int:
        """The columns that share a scale if a row of `columns` has `count` scales."""
        if count == 1:
            return columns
        size = -(-columns // count)
        stated = None if self.scheme is None else self.scheme.group
        if stated is not None and -(-columns // stated) == count:
            size = stated
        if size not in GROUPS or -(-columns // size) != count:
            raise self.wrong(
                f"has {count} scales for {columns} columns, but supported groups have "
                f"{', '.join(map(str, GROUPS))} columns or all"
            )
        return size

    def wrong(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"tensor {self.name} of {self.source} {reason}.")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(_plain, dtypes))
