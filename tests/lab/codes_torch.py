"""Torch's product of codes, alone and with the kernels around it, for `measure_codes.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import linear_tune
import torch
from torch import Tensor

from slipstream.kernels.linear.linear_choice import Shape
from slipstream.kernels.packed.coded import Coding, code_rows
from slipstream.kernels.packed.kinds import Quantised, has_groups
from slipstream.kernels.packed.linear import packed_gated_linear, packed_linear
from slipstream.kernels.quant.tiled import TiledWeight

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def time_calls(calls: list[Callable[[], object]]) -> float:
    """Microseconds of a call in a graph of enough of them."""
    return linear_tune.time_in_graph(calls * -(-linear_tune.MIN_CALLS // len(calls)), repeats=3)


def torch_us(name: str, shape: Shape, x: Tensor, copies: Sequence[TiledWeight]) -> float | None:
    """Microseconds of torch's product of codes alone, None if it knows none."""
    codes = x.to(E4M3)
    if name == "fp8":
        scale_a = torch.ones(x.shape[0], 1, device=x.device)
        scale_b = torch.ones(1, shape.outputs, device=x.device)
    else:
        scale_a = torch.ones(shape.inputs // 128, x.shape[0], device=x.device).T
        scale_b = torch.ones(shape.outputs // 128, shape.inputs // 128, device=x.device).T
    product = partial(
        torch._scaled_mm, scale_a=scale_a, scale_b=scale_b, out_dtype=BF16,
        use_fast_accum=name == "fp8",
    )  # fmt: skip
    try:
        return time_calls([partial(product, codes, copy.words.view(E4M3).T) for copy in copies])
    except Exception as problem:  # a lab script: name it and go on
        print(f"  torch {name} {shape}: {problem}", flush=True)
        return None


def layer_by_torch(shape: Shape, x: Tensor, weight: TiledWeight) -> Tensor:
    """A layer of more than 256 rows in a step: x is coded rows, or numbers before o. That of gates
    also gates and codes its output."""
    if shape.role == "gate_up":
        after = Coding(shape.outputs // 2, has_groups(weight), planar=True)
        return packed_gated_linear(x, weight, None, "silu", Quantised(), None, BF16, after)
    return packed_linear(x, weight, None, Quantised(), None, None, BF16)


def wide_us(shape: Shape, x: Tensor, copies: Sequence[TiledWeight]) -> dict[str, float]:
    """Microseconds of `layer_by_torch` for x [M, K] in 16 bits, of which o codes its input
    ("around"), and of torch's product with a copy of the weight in 16 bits ("copy")."""
    calls: list[Callable[[], object]] = [partial(packed_linear, x, w) for w in copies]
    copied = time_calls(calls)
    if shape.role != "o":
        x = code_rows(x, Coding(shape.inputs, has_groups(copies[0]), planar=True))
    calls = [partial(layer_by_torch, shape, x, w) for w in copies]
    return {"around": time_calls(calls), "copy": copied}
