"""Building blocks of models: projections, norms, embeddings; how checkpoint tensors reach them.

A module offers one `CheckpointSlot` per tensor it takes from a checkpoint, under the checkpoint's
own name; fused projections offer one slot per part. Nothing here knows file formats.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.linear.embedding import embedding
from ...kernels.linear.head_sample import Draws, sample_head
from ...kernels.linear.linear import GATED, Norm, gated_linear, linear, linear_parts
from ...kernels.linear.linear_choice import Choice, Gemv, Shape
from ...kernels.linear.linear_tuned import LinearChooser, create_chooser
from ...kernels.linear.norm_rope import fused_add_rms_norm, rms_norm
from ...kernels.linear.streams import write_stream


@dataclass(frozen=True)
class CheckpointSlot:
    """Where one checkpoint tensor goes. `load` takes it on any device, in any float dtype; loads of
    different tensors may run in several threads at once."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    init: str = "normal"  # random weights: "normal", "ones" or "zeros"
    optional: bool = False  # a checkpoint may leave it out


def tensor_slot(target: Tensor, init: str = "normal", optional: bool = False) -> CheckpointSlot:
    """The slot of a tensor that is stored as it is used."""

    def load(tensor: Tensor) -> None:
        target.copy_(tensor)

    return CheckpointSlot(tuple(target.shape), load, init, optional)


@runtime_checkable
class TakesCheckpoint(Protocol):
    """A module with weights. `parent` is its parent's name with a dot, or empty; `name` its own."""

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]: ...


@dataclass(frozen=True)
class WeightFormat:
    """Where a model lives and in which number formats."""

    device: torch.device
    dtype: torch.dtype  # activations, and weights unless packed
    pack_fp16: bool = False  # CPU: linear weights as packed fp16, accumulated in fp32
    linear: LinearChooser | None = None  # which kernels compute linear layers; None = torch

    @property
    def table_dtype(self) -> torch.dtype:
        """Of embedding tables, which are only gathered from."""
        return torch.float16 if self.pack_fp16 else self.dtype


def resolve_format(
    name: str, device: torch.device, checkpoint_dtype: object, linear_backend: str = "torch"
) -> WeightFormat:
    """The format for `--dtype name`; `auto` is packed fp16 on x86 CPUs, bf16 or fp16 on GPUs."""
    if name == "auto" and device.type == "cpu":
        return WeightFormat(device, torch.float32, pack_fp16=packing_available())
    if name == "auto":
        half = str(checkpoint_dtype).removeprefix("torch.") == "float16"
        name = "float16" if half else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return WeightFormat(device, dtype, linear=create_chooser(linear_backend, device, dtype))


@functools.cache
def packing_available() -> bool:
    """True if this CPU and this build of torch have the packed fp16 linear layer."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.eye(8), None)
        out = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 8), packed)
    except RuntimeError:
        return False
    return bool((out == 1).all())


class Linear(nn.Module):
    """y = x Wᵀ + b for one or several checkpoint matrices fused along the output.

    `outputs` is the number of outputs, or for a fused layer maps each part's checkpoint name (a
    sibling of this module's) to its number, in order. `role` is one of `linear_choice.ROLES`.
    """

    weight: Tensor | None  # [out_features, in_features]
    bias: Tensor | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        outputs: int | Mapping[str, int],
        fmt: WeightFormat,
        bias: bool = False,
        role: str = "other",
    ) -> None:
        super().__init__()
        self.shards = {"": outputs} if isinstance(outputs, int) else dict(outputs)
        self.in_features, self.out_features = in_features, sum(self.shards.values())
        self.format, self.chooser = fmt, fmt.linear
        self.shape = Shape(role, self.out_features, in_features)
        kinds = ("weight", "bias") if bias else ("weight",)
        self._missing = {(shard, kind) for shard in self.shards for kind in kinds}
        self._packed: Any = None
        self._lock = threading.Lock()  # of what parts that arrive change
        empty = functools.partial(torch.empty, dtype=fmt.dtype, device=fmt.device)
        # packed weights exist unpacked only while their parts arrive
        weight = None if fmt.pack_fp16 else empty(self.out_features, in_features)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", empty(self.out_features) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        if self._packed is not None:
            # `.default` skips the overload lookup, 9 us of a call
            out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed)
            return out
        assert self.weight is not None, "weights are not loaded"
        if self.chooser is None:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, self._choice(x))

    def parts(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """`forward` of x [M, in_features], normed first; whole [M, out_features], or float32 parts
        [S, M, out_features] whose sum it is, for `RMSNorm.add` or a fused rotary embedding."""
        if self._packed is not None or self.weight is None:
            return self.forward(x if norm is None else rms_norm(x, *norm))
        return linear_parts(x, self.weight, self.bias, self._choice(x), norm)

    def gated(self, x: Tensor, activation: str, norm: Norm | None = None) -> Tensor:
        """act(gate) * up of a fused gate and up projection; [M, in_features] -> [M, I]."""
        if self._packed is not None or self.weight is None:
            return GATED[activation](self.parts(x, norm))
        return gated_linear(x, self.weight, self.bias, activation, self._choice(x), norm)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + `forward`; [M, in_features] -> [M, out_features]."""
        if self._packed is not None or self.weight is None:
            return residual + self.forward(x)
        return linear(x, self.weight, self.bias, self._choice(x), None, residual)

    def pick(
        self, x: Tensor, num_outputs: int | None = None, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of an output head: a token for each row [L, in_features], of the first `num_outputs` if
        given, and the row's largest logit (see `head_sample.sample_head`)."""
        assert self.weight is not None and self.bias is None
        return sample_head(x, self.weight[:num_outputs], draws, self._choice(x))

    def norms(self, num_rows: int) -> bool:
        """Whether the kernel for so many rows norms its input itself."""
        choice = None if self.chooser is None else self.chooser.choose(self.shape, num_rows)
        return choice is not None and bool(choice.norm)

    def adds(self, num_rows: int) -> bool:
        """Whether the kernel for so many rows adds a residual itself."""
        return self.chooser is not None and isinstance(
            self.chooser.choose(self.shape, num_rows), Gemv
        )

    def _choice(self, x: Tensor) -> Choice:
        if self.chooser is None or x.dim() != 2 or not x.is_contiguous():
            return None
        return self.chooser.choose(self.shape, x.shape[0])

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        start = 0
        for shard, size in self.shards.items():
            path, part = f"{parent}{shard or name}", slice(start, start + size)
            load = functools.partial(self._load_weight, shard, part)
            yield f"{path}.weight", CheckpointSlot((size, self.in_features), load)
            if self.bias is not None:
                load = functools.partial(self._load_bias, shard, part)
                yield f"{path}.bias", CheckpointSlot((size,), load, "zeros")
            start += size

    def _load_weight(self, shard: str, part: slice, tensor: Tensor) -> None:
        with self._lock:
            if self.weight is None:
                self.weight = torch.empty(self.out_features, self.in_features)
                self._missing |= {(shard, "weight") for shard in self.shards}
                self._packed = None
        self.weight[part].copy_(tensor)
        self._arrived(shard, "weight")

    def _load_bias(self, shard: str, part: slice, tensor: Tensor) -> None:
        assert self.bias is not None
        self.bias[part].copy_(tensor)
        self._arrived(shard, "bias")

    def _arrived(self, shard: str, kind: str) -> None:
        with self._lock:
            self._missing.discard((shard, kind))
            is_last = not self._missing
        if self.format.pack_fp16 and is_last:
            self._pack()

    def _pack(self) -> None:
        assert self.weight is not None
        # what fp16 cannot hold stays in fp32
        low, high = self.weight.aminmax()
        if max(-float(low), float(high)) <= torch.finfo(torch.float16).max:
            self._packed = torch.ops.quantized.linear_prepack_fp16(self.weight, self.bias)
            self.weight = None


class RMSNorm(nn.Module):
    """Root-mean-square norm. With `offset` 1 the checkpoint stores weight - 1 (Gemma 3); an `exact`
    weight stays in fp32 and is applied before rounding (Gemma)."""

    weight: Tensor  # [size]

    def __init__(
        self,
        size: int,
        eps: float,
        fmt: WeightFormat,
        offset: float = 0.0,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        # 1 + w would lose w's digits in bf16
        dtype = torch.float32 if offset or exact else fmt.dtype
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=fmt.device))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size], normed."""
        return rms_norm(x, self.weight, self.eps)

    @property
    def inside(self) -> Norm:
        """For a linear layer that norms its input itself."""
        return self.weight, self.eps

    def add(
        self,
        x: Tensor,
        residual: Tensor | None,
        rows: Tensor | None = None,
        out: Tensor | None = None,
        stream: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(normed x + residual, x + residual), both [M, size], in `out` and `stream` where they are
        given; a missing residual is 0, of a longer one `rows` [M] int64 are meant; x may be parts
        [S, M, size]."""
        if residual is None:
            total = x if stream is None else write_stream(x, None, stream)
            return rms_norm(x, self.weight, self.eps, out), total
        return fused_add_rms_norm(x, residual, self.weight, self.eps, rows, out, stream)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        init = "zeros" if self.offset else "ones"
        slot = CheckpointSlot(tuple(self.weight.shape), self._load, init)
        yield f"{parent}{name}.weight", slot

    def _load(self, tensor: Tensor) -> None:
        self.weight.copy_(tensor.float() + self.offset if self.offset else tensor)


class Embedding(nn.Module):
    """A table of rows; rows come out in the activation dtype."""

    weight: Tensor  # [num_rows, size]

    def __init__(self, num_rows: int, size: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.dtype = fmt.dtype
        table = torch.empty(num_rows, size, dtype=fmt.table_dtype, device=fmt.device)
        self.register_buffer("weight", table)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [M] int32 or int64 -> [M, size]."""
        return embedding(ids, self.weight).to(self.dtype)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.weight", tensor_slot(self.weight)


def module_slots(root: nn.Module) -> dict[str, CheckpointSlot]:
    """The slots of all modules under `root`; names follow the module tree."""
    slots: dict[str, CheckpointSlot] = {}
    for path, module in root.named_modules():
        if path and isinstance(module, TakesCheckpoint):
            parent, dot, own_name = path.rpartition(".")
            for name, slot in module.checkpoint_slots(f"{parent}{dot}", own_name):
                assert name not in slots, f"two modules take {name}"
                slots[name] = slot
    return slots
