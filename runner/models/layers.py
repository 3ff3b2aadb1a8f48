"""The building blocks of models (projections, norms, embeddings), and how their weights are loaded.

A module yields one `CheckpointSlot` per checkpoint tensor that it needs, under the tensor's name in
the checkpoint; a fused projection yields one per part. Nothing here knows file formats.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.cpu.formats import StoredRows
from ...kernels.cpu.matrix import Matrix
from ...kernels.cpu.weight import QuantizedWeight, pack_any
from ...kernels.linear.activation import GATED
from ...kernels.linear.embedding import embedding
from ...kernels.linear.head_sample import Draws, sample_head
from ...kernels.linear.linear import Norm, gated_linear, linear, linear_parts
from ...kernels.linear.linear_choice import Choice, Gemv, Shape, Skinny
from ...kernels.linear.norm_rope import fused_add_rms_norm, rms_norm
from ...kernels.linear.streams import write_stream
from ...kernels.packed.coded import Coding, norm_and_code
from ...kernels.packed.embedding import packed_embedding
from ...kernels.quant.packed import PackedWeight
from ...kernels.quant.tiled import prepare
from .formats.packed import Packed, PackedLayer, Part
from .formats.slots import CheckpointSlot as CheckpointSlot
from .formats.slots import TakesCheckpoint as TakesCheckpoint
from .formats.slots import matrix_slot
from .formats.slots import module_slots as module_slots
from .formats.slots import tensor_slot as tensor_slot
from .formats.weight_format import WeightFormat as WeightFormat


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
        self.packed: PackedLayer | None = None  # the weights, if they are quantised on a GPU
        self._parts: dict[str, QuantizedWeight] = {}  # native weights by shard
        self._arrived_parts: dict[str, Part] = {}  # by shard, if the format is `packed`
        self._lock = threading.Lock()  # guards what loading threads change
        empty = functools.partial(torch.empty, dtype=fmt.dtype, device=fmt.device)
        # fp16 weights exist unpacked only while their parts are loaded
        has_weight = not (fmt.pack_fp16 or fmt.native or fmt.packed)
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
        if self.packed is not None:
            return self.packed.forward(x, self.bias)
        assert self.weight is not None, "weights are not loaded"
        if self.chooser is None:
            return F.linear(x, self.weight, self.bias)
        if self.format.batch_invariant:
            x = x.contiguous()
        choice = self._choice(x)
        if isinstance(choice, Skinny) and choice.split_k > 1:
            choice = None  # nothing after this layer sums parts; torch's kernel splits by itself
        return linear(x, self.weight, self.bias, choice)

    def parts(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """`forward` of x [M, in_features], normed first if `norm` is given.

        Returns [M, out_features], or S float32 partial sums [S, M, out_features], which
        `RMSNorm.add` or a fused rotary embedding adds up.
        """
        if self.packed is not None:
            return self.packed.sums(x, self.bias, norm)
        if self.weight is None:
            return self.forward(x if norm is None else rms_norm(x, *norm))
        return linear_parts(x, self.weight, self.bias, self._choice(x), norm)

    def forward_normed(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """`forward` of x [M, in_features], normed first if `norm` is given; see `norms`."""
        if norm is None:
            return self.forward(x)
        if self.packed is not None:
            return self.packed.forward(x, self.bias, norm)
        out = self.parts(x, norm)
        assert out.dim() == 2, "a kernel that norms its input splits no sums"
        return out

    def gated(
        self, x: Tensor, activation: str, norm: Norm | None = None, coding: Coding | None = None
    ) -> Tensor:
        """act(gate) * up, for a fused gate and up projection; [M, in_features] -> [M, I].

        The result may be coded rows if the next layer wants `coding`.
        """
        if self.packed is not None:
            return self.packed.gated(x, self.bias, activation, norm, coding)
        if self.weight is None:
            return GATED[activation](self.parts(x, norm))
        return gated_linear(x, self.weight, self.bias, activation, self._choice(x), norm)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + forward(x); [M, in_features] -> [M, out_features]."""
        if self.packed is not None:
            return self.packed.forward(x, self.bias, None, residual)
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
        if self.packed is not None:
            return self.packed.pick(x, num_outputs, draws)
        assert self.weight is not None and self.bias is None
        return sample_head(x, self.weight[:num_outputs], draws, self._choice(x))

    @property
    def can_pick(self) -> bool:
        """Whether `pick` spares anything: kernels of ours may compute this layer."""
        if self.packed is not None:
            return not self.packed.torch_only
        return self.chooser is not None and self.weight is not None

    def norms(self, num_rows: int) -> bool:
        """True if the kernel for `num_rows` rows can norm its input itself."""
        if self.packed is not None:
            return self.packed.norms(num_rows)
        choice = None if self.chooser is None else self.chooser.choose(self.shape, num_rows)
        return choice is not None and bool(choice.norm)

    def coding(self, num_rows: int) -> Coding | None:
        """How the kernel for `num_rows` rows wants its input coded; None if it takes numbers."""
        return None if self.packed is None else self.packed.coding(num_rows)

    def adds(self, num_rows: int) -> bool:
        """True if the kernel for `num_rows` rows can add a residual itself."""
        if self.packed is not None:
            return self.packed.adds(num_rows)
        return self.chooser is not None and isinstance(
            self.chooser.choose(self.shape, num_rows), Gemv
        )

    def by_torch(self, num_rows: int) -> bool:
        """True if torch computes the product of `num_rows` rows, by one matrix."""
        if self.packed is not None:
            return self.packed.by_torch(num_rows)
        return self.chooser is None or self.chooser.choose(self.shape, num_rows) is None

    def _choice(self, x: Tensor) -> Choice:
        if self.chooser is None:
            return None
        if x.dim() != 2 or not x.is_contiguous():
            assert not self.format.batch_invariant, "torch would choose a kernel by shape"
            return None
        return self.chooser.choose(self.shape, x.shape[0])

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        start = 0
        for shard, size in self.shards.items():
            path, part = f"{parent}{shard or name}", slice(start, start + size)
            load: Callable[[Any], None] = functools.partial(self._load_weight, shard, part)
            if self.format.native:
                load = functools.partial(self._load_native, shard)
            elif self.format.packed:
                load = functools.partial(self.use_part, shard)
            yield f"{path}.weight", matrix_slot((size, self.in_features), load, self.format)
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
        """Set the native weight of one part. It may be shared with other layers."""
        self._parts[shard] = weight
        self._arrived(shard, "weight")

    def use_part(self, shard: str, weight: Part) -> None:
        """Set the weight of one part in its file's format. The tensor may be shared with others."""
        if isinstance(weight, Tensor):
            weight = weight.to(self.format.device, self.format.dtype)
        with self._lock:
            if not self._missing:
                self._missing = {(shard, "weight") for shard in self.shards}
            self._arrived_parts[shard] = weight
        self._arrived(shard, "weight")

    def _settle(self) -> None:
        """Join the parts, which have all arrived, into the layer's weight."""
        parts = [self._arrived_parts.pop(shard) for shard in self.shards]
        dense = [part for part in parts if isinstance(part, Tensor)]
        if len(dense) == len(parts):
            self.weight = dense[0] if len(dense) == 1 else torch.cat(dense)
            return
        self.packed = PackedLayer(parts, self.shape.role, self.format.torch_only, self.format.dtype)
        self.__dict__["packed"] = self.packed  # looked up faster than a submodule

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
            if self._arrived_parts and len(self._arrived_parts) == len(self.shards):
                self._settle()
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

    def add_coded(
        self, x: Tensor, residual: Tensor | None, coding: Coding
    ) -> tuple[Tensor, Tensor]:
        """As `add`, with the norm as coded rows for the next layer."""
        return norm_and_code(x, residual, self.weight, self.eps, coding)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        init = "zeros" if self.offset else "ones"
        slot = CheckpointSlot(tuple(self.weight.shape), self._load, init)
        yield f"{parent}{name}.weight", slot

    def _load(self, tensor: Tensor) -> None:
        self.weight.copy_(tensor.float() + self.offset if self.offset else tensor)


class Embedding(nn.Module):
    """An embedding table. Rows are returned in the dtype of activations."""

    weight: Tensor | None  # [num_rows, size]; None where rows are in the format of their file
    whole = True  # whether `weight` has the rows of all ids

    def __init__(self, num_rows: int, size: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.shape, self.dtype, self.format = (num_rows, size), fmt.dtype, fmt
        self.native: QuantizedWeight | None = None
        self.packed: Packed | None = None
        self.heads: list[Linear] = []  # which multiply by the table
        keeps = fmt.native or fmt.packed
        table = None if keeps else torch.empty(self.shape, dtype=fmt.table_dtype, device=fmt.device)
        self.register_buffer("weight", table)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [M] int32 or int64 -> [M, size]."""
        if self.native is not None:
            return self.native.rows(ids)
        if self.packed is not None:
            rows = packed_embedding(ids.flatten(), self.packed.weight, self.dtype)
            return rows.view(*ids.shape, -1)
        assert self.weight is not None, "weights are not loaded"
        return embedding(ids, self.weight).to(self.dtype)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.weight", matrix_slot(self.shape, self._load, self.format)

    def _load(self, table: Part | StoredRows) -> None:
        if self.format.packed:
            assert not isinstance(table, StoredRows)
            self._keep(table)
            return
        assert not isinstance(table, PackedWeight)
        if self.format.native and (self.heads or isinstance(table, StoredRows)):
            self.native = pack_any(table)
            for head in self.heads:
                head.use(self.native)
            return
        assert isinstance(table, Tensor)
        if self.weight is None:
            dtype = torch.float16 if table.dtype is torch.float32 else table.dtype
            self.weight = torch.empty(self.shape, dtype=dtype)
        self.weight.copy_(table)

    def _keep(self, table: Part) -> None:
        """Keep a table of the checkpoint, quantised or not, and give it to the heads."""
        if isinstance(table, Tensor):
            table = self.weight = table.to(self.format.device, self.format.dtype)
        for head in self.heads:
            head.use_part("", table)
        if isinstance(table, PackedWeight):
            # The form that a head reads is one that rows can be taken from as well.
            shared = next((h.packed.whole for h in self.heads if h.packed is not None), None)
            self.packed = Packed(prepare(table) if shared is None else shared)
