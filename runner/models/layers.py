"""The building blocks of models (projections, norms, embeddings), and how their weights are loaded.

A module yields one `CheckpointSlot` per checkpoint tensor that it needs, under the tensor's name in
the checkpoint; a fused projection yields one per part. Nothing here knows file formats.
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

from ...kernels.cpu import weight as native
from ...kernels.cpu.formats import StoredRows
from ...kernels.cpu.matrix import Matrix
from ...kernels.cpu.weight import QuantizedWeight, pack_any
from ...kernels.linear.embedding import embedding
from ...kernels.linear.head_sample import Draws, sample_head
from ...kernels.linear.linear import GATED, Norm, gated_linear, linear, linear_parts
from ...kernels.linear.linear_choice import Choice, Gemv, Shape
from ...kernels.linear.linear_tuned import LinearChooser, create_chooser
from ...kernels.linear.norm_rope import fused_add_rms_norm, rms_norm
from ...kernels.linear.streams import write_stream


@dataclass(frozen=True)
class CheckpointSlot:
    """The destination of one checkpoint tensor.

    `load` accepts the tensor on any device and in any float dtype. Different slots may be loaded by
    several threads at once.
    """

    shape: tuple[int, ...]
    load: Callable[[Any], None]  # takes a Tensor, and StoredRows if `takes_rows`
    init: str = "normal"  # initial values if weights are random: "normal", "ones" or "zeros"
    optional: bool = False  # the checkpoint may lack it
    takes_rows: bool = False  # `load` also accepts a matrix as a GGUF file stores it
    # What may be stored in one of several forms, and the form to which this tensor belongs. A
    # checkpoint has all tensors of one form; random weights are drawn for the first.
    form: tuple[str, str] | None = None


def tensor_slot(
    target: Tensor,
    init: str = "normal",
    optional: bool = False,
    form: tuple[str, str] | None = None,
) -> CheckpointSlot:
    """The slot of a tensor that is copied without a change of form."""

    def load(tensor: Tensor) -> None:
        target.copy_(tensor)

    return CheckpointSlot(tuple(target.shape), load, init, optional, form=form)


@runtime_checkable
class TakesCheckpoint(Protocol):
    """A module with weights. `parent` is its parent's name and a dot, or empty; `name` is its
    own."""

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]: ...


@dataclass(frozen=True)
class WeightFormat:
    """The device and the number formats of a model."""

    device: torch.device
    dtype: torch.dtype  # activations, and weights unless packed
    pack_fp16: bool = False  # on a CPU: linear weights are packed fp16, with fp32 accumulation
    linear: LinearChooser | None = None  # chooses the kernels of linear layers; None = torch
    native: bool = False  # on a CPU: `kernels.cpu` multiplies weights in their stored formats

    @property
    def table_dtype(self) -> torch.dtype:
        """The dtype of embedding tables, which are only looked up, never multiplied. A `native`
        table has its stored format instead."""
        return torch.float16 if self.pack_fp16 else self.dtype


def resolve_format(
    name: str, device: torch.device, checkpoint_dtype: object, linear_backend: str = "torch"
) -> WeightFormat:
    """The format for `--dtype name`.

    On a CPU, `auto` keeps every weight in its stored format if there are native kernels; otherwise
    it is packed fp16 on x86 and fp32 on others. On a GPU it is fp16 if the checkpoint is fp16,
    otherwise bf16.
    """
    if name == "auto" and device.type == "cpu":
        if native.available():
            return WeightFormat(device, torch.float32, native=True)
        return WeightFormat(device, torch.float32, pack_fp16=packing_available())
    if name == "auto":
        half = str(checkpoint_dtype).removeprefix("torch.") == "float16"
        name = "float16" if half else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return WeightFormat(device, dtype, linear=create_chooser(linear_backend, device, dtype))


@functools.cache
def packing_available() -> bool:
    """True if this CPU and this build of torch support the packed fp16 linear layer."""
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
    """y = x Wᵀ + b, for one checkpoint matrix or several fused along the output.

    `outputs` is the number of outputs. For a fused layer it maps the checkpoint name of each part,
    which replaces this module's own, to the part's number, in order. `role` is one of
    `linear_choice.ROLES`.
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
        self.matrix: Matrix | None = None  # the weights, if they are multiplied natively
        self._parts: dict[str, QuantizedWeight] = {}  # native weights by shard
        self._lock = threading.Lock()  # guards what loading threads change
        empty = functools.partial(torch.empty, dtype=fmt.dtype, device=fmt.device)
        # fp16 weights exist unpacked only while their parts are loaded
        has_weight = not (fmt.pack_fp16 or fmt.native)
        weight = empty(self.out_features, in_features) if has_weight else None
        self.register_buffer("weight", weight)
        self.register_buffer("bias", empty(self.out_features) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        if self.matrix is not None:
            return self.matrix.multiply(x)
        if self._packed is not None:
            # `.default` skips the overload lookup, which costs 9 us per call
            out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed)
            return out
        assert self.weight is not None, "weights are not loaded"
        if self.chooser is None:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, self._choice(x))

    def parts(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """`forward` of x [M, in_features], normed first if `norm` is given.

        Returns [M, out_features], or S float32 partial sums [S, M, out_features], which
        `RMSNorm.add` or a fused rotary embedding adds up.
        """
        if self.weight is None:
            return self.forward(x if norm is None else rms_norm(x, *norm))
        return linear_parts(x, self.weight, self.bias, self._choice(x), norm)

    def gated(self, x: Tensor, activation: str, norm: Norm | None = None) -> Tensor:
        """act(gate) * up, for a fused gate and up projection; [M, in_features] -> [M, I]."""
        if self.weight is None:
            return GATED[activation](self.parts(x, norm))
        return gated_linear(x, self.weight, self.bias, activation, self._choice(x), norm)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + forward(x); [M, in_features] -> [M, out_features]."""
        if self.weight is None:
            return residual + self.forward(x)
        return linear(x, self.weight, self.bias, self._choice(x), None, residual)

    def pick(
        self, x: Tensor, num_outputs: int | None = None, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """For an output head: choose a token for each row of x [L, in_features].

        Only the first `num_outputs` tokens count, if given. Returns (tokens [L], largest logits
        [L]); see `head_sample.sample_head`.
        """
        assert self.weight is not None and self.bias is None
        return sample_head(x, self.weight[:num_outputs], draws, self._choice(x))

    def norms(self, num_rows: int) -> bool:
        """True if the kernel for `num_rows` rows can norm its input itself."""
        choice = None if self.chooser is None else self.chooser.choose(self.shape, num_rows)
        return choice is not None and bool(choice.norm)

    def adds(self, num_rows: int) -> bool:
        """True if the kernel for `num_rows` rows can add a residual itself."""
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
            load: Callable[[Any], None] = functools.partial(self._load_weight, shard, part)
            if self.format.native:
                load = functools.partial(self._load_native, shard)
            shape = (size, self.in_features)
            yield f"{path}.weight", CheckpointSlot(shape, load, takes_rows=self.format.native)
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

    def _load_native(self, shard: str, weight: Tensor | StoredRows) -> None:
        self.use(pack_any(weight), shard)

    def use(self, weight: QuantizedWeight, shard: str = "") -> None:
        """Take a part's weight, perhaps one that others use, too."""
        self._parts[shard] = weight
        self._arrived(shard, "weight")

    def _load_bias(self, shard: str, part: slice, tensor: Tensor) -> None:
        assert self.bias is not None
        self.bias[part].copy_(tensor)
        self._arrived(shard, "bias")

    def _arrived(self, shard: str, kind: str) -> None:
        with self._lock:
            self._missing.discard((shard, kind))
            is_last = not self._missing
            if self.format.native and is_last:
                self.matrix = Matrix([self._parts[shard] for shard in self.shards], self.bias)
        if self.format.pack_fp16 and is_last:
            self._pack()

    def _pack(self) -> None:
        assert self.weight is not None
        # weights beyond fp16's range stay in fp32
        low, high = self.weight.aminmax()
        if max(-float(low), float(high)) <= torch.finfo(torch.float16).max:
            self._packed = torch.ops.quantized.linear_prepack_fp16(self.weight, self.bias)
            self.weight = None


class RMSNorm(nn.Module):
    """Root-mean-square norm.

    With `offset` 1 the checkpoint stores weight - 1 (Gemma 3). An `exact` weight stays in fp32 and
    is applied before rounding (Gemma 4).
    """

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
        # in bf16, 1 + w would lose digits of w
        dtype = torch.float32 if offset or exact else fmt.dtype
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=fmt.device))

    def forward(self, x: Tensor) -> Tensor:
        """Norm x [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    @property
    def inside(self) -> Norm:
        """Its parameters, for a linear layer that norms its input itself."""
        return self.weight, self.eps

    def add(
        self,
        x: Tensor,
        residual: Tensor | None,
        rows: Tensor | None = None,
        out: Tensor | None = None,
        stream: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), both [M, size].

        They are written into `out` and `stream` if given. x may be S partial sums [S, M, size]. A
        residual of None counts as 0; of a residual with more rows, `rows` [M] int64 are used.
        """
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
    """An embedding table. Rows are returned in the dtype of activations."""

    weight: Tensor | None  # [num_rows, size]; None where rows are in the format of their file

    def __init__(self, num_rows: int, size: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.shape, self.dtype, self.format = (num_rows, size), fmt.dtype, fmt
        self.packed: QuantizedWeight | None = None
        self.heads: list[Linear] = []  # which multiply by the table
        table = torch.empty(num_rows, size, dtype=fmt.table_dtype, device=fmt.device)
        self.register_buffer("weight", None if fmt.native else table)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [M] int32 or int64 -> [M, size]."""
        if self.packed is not None:
            return self.packed.rows(ids)
        assert self.weight is not None, "weights are not loaded"
        return embedding(ids, self.weight).to(self.dtype)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        slot = CheckpointSlot(self.shape, self._load, takes_rows=self.format.native)
        yield f"{parent}{name}.weight", slot

    def _load(self, table: Tensor | StoredRows) -> None:
        if self.format.native and (self.heads or isinstance(table, StoredRows)):
            self.packed = pack_any(table)
            for head in self.heads:
                head.use(self.packed)
            return
        assert isinstance(table, Tensor)
        if self.weight is None:
            dtype = torch.float16 if table.dtype is torch.float32 else table.dtype
            self.weight = torch.empty(self.shape, dtype=dtype)
        self.weight.copy_(table)


def module_slots(root: nn.Module) -> dict[str, CheckpointSlot]:
    """The slots of all modules below `root`, named by their path in the module tree."""
    slots: dict[str, CheckpointSlot] = {}
    for path, module in root.named_modules():
        if path and isinstance(module, TakesCheckpoint):
            parent, dot, own_name = path.rpartition(".")
            for name, slot in module.checkpoint_slots(f"{parent}{dot}", own_name):
                assert name not in slots, f"two modules load {name}"
                slots[name] = slot
    return slots
