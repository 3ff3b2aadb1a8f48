"""The number formats of a model's weights, chosen by device, flags and checkpoint."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass, replace

import torch

from ....kernels.cpu import weight as native
from ....kernels.linear.fixed import create_fixed_chooser
from ....kernels.linear.linear_tuned import LinearChooser, create_chooser
from ...parallel.experts import ExpertRanks
from ...parallel.ranks import Ranks


@dataclass(frozen=True)
class WeightFormat:
    """The device and the number formats of a model."""

    device: torch.device
    dtype: torch.dtype  # activations, and weights unless packed
    pack_fp16: bool = False  # on a CPU: linear weights are packed fp16, with fp32 accumulation
    linear: LinearChooser | None = None  # chooses the kernels of linear layers; None = torch
    native: bool = False  # on a CPU: `kernels.cpu` multiplies weights in their stored formats
    # Quantised matrices stay so. Linear layers then have no memory before their weights arrive.
    packed: bool = False
    torch_only: bool = False  # no kernels of ours for linear layers, quantised ones included
    ranks: Ranks | None = None  # which share the model; None: it is whole
    batch_invariant: bool = False  # no row's bits may depend on the rows beside it
    experts: ExpertRanks | None = None  # which share the experts of several engines

    @property
    def table_dtype(self) -> torch.dtype:
        """The dtype of embedding tables, which are only looked up, never multiplied. A `native`
        table has its stored format instead."""
        return torch.float16 if self.pack_fp16 else self.dtype

    @property
    def is_plain(self) -> bool:
        """Whether torch computes all linear layers, so that fusing anything with them is in
        vain."""
        return self.linear is None and (self.torch_only or not self.packed)


def split_format(fmt: WeightFormat, ranks: Ranks | None) -> WeightFormat:
    """The format of a rank's part of a model."""
    if ranks is None:
        return fmt
    return replace(fmt, pack_fp16=False, ranks=ranks)


def resolve_format(
    name: str,
    device: torch.device,
    checkpoint_dtype: object,
    linear_backend: str = "torch",
    batch_invariant: bool = False,
) -> WeightFormat:
    """The format for `--dtype name`.

    On a CPU, `auto` keeps every weight in its stored format if there are native kernels; otherwise
    it is packed fp16 on x86 and fp32 on others. On a GPU it is fp16 if the checkpoint is fp16,
    otherwise bf16.
    """
    if name == "auto" and device.type == "cpu":
        if native.available():
            return WeightFormat(device, torch.float32, native=True, batch_invariant=batch_invariant)
        packs = packing_available() and not batch_invariant
        return WeightFormat(device, torch.float32, pack_fp16=packs, batch_invariant=batch_invariant)
    if name == "auto":
        half = str(checkpoint_dtype).removeprefix("torch.") == "float16"
        name = "float16" if half else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    if batch_invariant:
        fixed = create_fixed_chooser(device, dtype)
        return WeightFormat(device, dtype, linear=fixed, batch_invariant=True)
    chooser = create_chooser(linear_backend, device, dtype)
    return WeightFormat(device, dtype, linear=chooser, torch_only=linear_backend == "torch")


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
