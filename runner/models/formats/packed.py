"""Modules that hold quantised weights, so that their memory is counted and swapped as any other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....kernels.linear.activation import GATED
from ....kernels.linear.head_sample import Draws, pick_rows
from ....kernels.linear.linear import Norm
from ....kernels.linear.linear_choice import Gemv
from ....kernels.linear.norm_rope import rms_norm
from ....kernels.packed.coded import Coding
from ....kernels.packed.kinds import Codes, Direct, PackedChoice, Quantised, Row, has_groups
from ....kernels.packed.linear import (
    choose_packed,
    packed_gated_linear,
    packed_linear,
    packed_linear_parts,
    packed_sample_head,
)
from ....kernels.quant.packed import PackedWeight, can_concatenate, concatenate
from ....kernels.quant.tiled import Weight, prepare

Part = PackedWeight | Tensor


class Packed(nn.Module):
    """One quantised matrix. Its tensors are the module's buffers, and keep their addresses."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight
        self.format = format_name(weight)  # tells layers with different kernels apart
        for index, tensor in enumerate(weight.tensors):
            self.register_buffer(f"tensor_{index}", tensor)


class PackedLayer(nn.Module):
    """The weights of a linear layer of which at least one part is quantised.

    Neighbours of one format are one matrix; parts of different formats are multiplied one by one.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        role: str,
        torch_only: bool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """parts: matrices [N_i, K] in the order of outputs. `role` is that of the layer's
        `Shape`. With `torch_only` no kernel of ours is chosen. `dtype` is that of outputs for an
        input of coded rows, which has none itself."""
        super().__init__()
        self.dtype = dtype
        self.role, self.torch_only = role, torch_only
        self._chosen: dict[tuple[str, int, int, int], PackedChoice] = {}
        self.parts: list[Weight | Tensor] = [_joined(run) for run in _runs(parts)]
        if not torch_only:  # one at a time, so that only one part is in memory twice
            for index, part in enumerate(self.parts):
                self.parts[index] = prepare(part) if isinstance(part, PackedWeight) else part
        self.sizes = [part.shape[0] for part in self.parts]
        for index, part in enumerate(self.parts):
            if isinstance(part, Tensor):
                self.register_buffer(f"dense_{index}", part)
            else:
                self.add_module(f"packed_{index}", Packed(part))

    @property
    def whole(self) -> Weight | None:
        """The matrix, if all parts are one."""
        only = self.parts[0]
        return None if len(self.parts) > 1 or isinstance(only, Tensor) else only

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + rms_norm(x) Wᵀ + bias, see `kernels.packed.linear.packed_linear`."""
        whole = self.whole
        if whole is not None:
            return packed_linear(x, whole, bias, self.choice(x), norm, residual, self.dtype)
        x = x if norm is None else rms_norm(x, *norm)
        biases = [None] * len(self.parts) if bias is None else torch.split(bias, self.sizes)
        outputs = [
            F.linear(x, part, own)
            if isinstance(part, Tensor)
            else packed_linear(x, part, own, self._choice(part, x))
            for part, own in zip(self.parts, biases, strict=True)
        ]
        out = torch.cat(outputs, -1)
        return out if residual is None else out + residual

    def sums(self, x: Tensor, bias: Tensor | None, norm: Norm | None) -> Tensor:
        """`forward`, perhaps as partial sums, see `packed_linear_parts`."""
        whole = self.whole
        if whole is None:
            return self.forward(x, bias, norm)
        return packed_linear_parts(x, whole, bias, self.choice(x), norm, self.dtype)

    def gated(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str,
        norm: Norm | None,
        coding: Coding | None = None,
    ) -> Tensor:
        """act(gate) * up, see `packed_gated_linear`."""
        whole = self.whole
        if whole is None:
            return GATED[activation](self.forward(x, bias, norm))
        choice = self.choice(x)
        return packed_gated_linear(x, whole, bias, activation, choice, norm, self.dtype, coding)

    def pick(
        self, x: Tensor, num_outputs: int | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        """A token for each row of a head's input, see `packed_sample_head`."""
        whole = self.whole
        if whole is None:
            return pick_rows(self.forward(x)[:, :num_outputs], draws)
        if num_outputs is not None:
            whole = whole.first_rows(num_outputs)
        return packed_sample_head(x, whole, draws, self.choice(x))

    def norms(self, num_rows: int) -> bool:
        """True if the kernel for `num_rows` rows can norm its input itself."""
        choice = self._choice_for(num_rows)
        return choice is not None and bool(choice.norm)

    def coding(self, num_rows: int) -> Coding | None:
        """How the kernel for `num_rows` rows wants them coded; None if it takes numbers."""
        whole, choice = self.whole, self._choice_for(num_rows)
        if whole is None:
            return None
        if isinstance(choice, Codes):
            return Coding(whole.shape[1], choice.by_group > 0)
        if isinstance(choice, Quantised) and whole.kind == "fp8":
            return Coding(whole.shape[1], has_groups(whole), planar=True)
        return None

    def adds(self, num_rows: int) -> bool:
        """True if the kernel for `num_rows` rows can add a residual itself."""
        choice = self._choice_for(num_rows)
        if isinstance(choice, Row | Direct):
            return choice.split_k == 1
        return isinstance(choice, Gemv)

    def by_torch(self, num_rows: int) -> bool:
        """True if torch computes the product of `num_rows` rows, by a copy of one matrix."""
        return self.whole is not None and self._choice_for(num_rows) is None

    def choice(self, x: Tensor) -> PackedChoice:
        """The kernel for these rows; None = torch."""
        whole = self.whole
        return None if whole is None else self._choice(whole, x)

    def _choice_for(self, num_rows: int) -> PackedChoice:
        whole = self.whole
        if whole is None or self.torch_only or self.dtype == torch.float32:
            return None  # no kernel takes numbers of 32 bits
        return choose_packed(whole, self.role, num_rows)

    def _choice(self, weight: Weight, x: Tensor) -> PackedChoice:
        if self.torch_only or x.dim() != 2 or not x.is_contiguous():
            return None
        key = weight.kind, weight.group, weight.shape[0], x.shape[0]
        if key not in self._chosen:
            self._chosen[key] = choose_packed(weight, self.role, x.shape[0])
        return self._chosen[key]


def format_name(weight: Weight) -> str:
    """A name of a matrix's format for logs and comparisons, such as "int4 in groups of 128"."""
    rows, columns = weight.shape
    group = "rows" if weight.group == columns else f"groups of {weight.group}"
    if weight.row_group > 1:
        group = f"blocks of {weight.row_group} x {weight.group}"
    extra = {"zeros": weight.zeros, "offsets": weight.offsets, "order": weight.order}
    present = [name for name, tensor in extra.items() if tensor is not None]
    return " with ".join([f"{weight.kind} in {group}", *present])


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that can be one matrix."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and _alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _alike(first: Part, part: Part) -> bool:
    if isinstance(first, PackedWeight) and isinstance(part, PackedWeight):
        return can_concatenate([first, part])
    return isinstance(first, Tensor) and isinstance(part, Tensor)


def _joined(run: Sequence[Part]) -> Part:
    packed = [part for part in run if isinstance(part, PackedWeight)]
    if packed:
        return concatenate(packed)
    dense = [part for part in run if isinstance(part, Tensor)]
    return dense[0] if len(dense) == 1 else torch.cat(dense)
