"""Random quantised weights of each format that the GPU kernels know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from slipstream.kernels.quant.packed import HIGH_BITS, SUPER, PackedWeight, pack_bits

FORMATS: dict[str, dict[str, Any]] = {  # a group of 0 is a whole row
    "fp8 rows": {"kind": "fp8"},
    "fp8 blocks": {"kind": "fp8", "group": 128, "row_group": 128},
    "int8 rows": {"kind": "int8", "dtype": torch.bfloat16},
    "int8 groups": {"kind": "int8", "group": 32},
    "int4 rows": {"kind": "int4", "zeros": True},
    "int4 128": {"kind": "int4", "group": 128, "dtype": torch.float16},
    "int4 128 zeros": {"kind": "int4", "group": 128, "dtype": torch.bfloat16, "zeros": True},
    "int4 64 zeros": {"kind": "int4", "group": 64, "zeros": True},
    "int4 32": {"kind": "int4", "group": 32, "dtype": torch.float16},
    "int4 32 offsets": {"kind": "int4", "group": 32, "dtype": torch.float16, "offsets": True},
    "int8 16": {"kind": "int8", "group": 16},
    "int8 32 offsets": {"kind": "int8", "group": 32, "dtype": torch.float16, "offsets": True},
    "int4 32 super": {"kind": "int4", "group": 32, "super": torch.uint8, "offsets": True},
    "int8 32 super": {"kind": "int8", "group": 32, "super": torch.uint8, "offsets": True},
    "int8 16 super": {"kind": "int8", "group": 16, "super": torch.int8},
    "int5 32": {"kind": "int5", "group": 32, "dtype": torch.float16},
    "int5 32 offsets": {"kind": "int5", "group": 32, "dtype": torch.float16, "offsets": True},
    "int5 32 super": {"kind": "int5", "group": 32, "super": torch.uint8, "offsets": True},
    "int5 16": {"kind": "int5", "group": 16},
    "int6 16 super": {"kind": "int6", "group": 16, "super": torch.int8},
    "int6 32": {"kind": "int6", "group": 32, "dtype": torch.bfloat16},
    "mxfp4": {"kind": "fp4", "group": 32, "dtype": torch.uint8},
    "nvfp4": {"kind": "fp4", "group": 16, "dtype": torch.float8_e4m3fn},
}


def _two_levels(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """A weight whose scales and offsets are rounded to integers of 8 bits times super scales."""

    def split(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        count = SUPER // weight.group
        padded = functional.pad(numbers, (0, -numbers.shape[1] % count))
        blocks = padded.view(numbers.shape[0], -1, count)
        supers = (blocks.abs().amax(-1) / 63).half()
        codes = (blocks / supers.float().unsqueeze(-1)).round()
        return codes.flatten(1)[:, : numbers.shape[1]].contiguous().to(dtype), supers

    scales, super_scales = split(weight.scales, dtype)
    if weight.offsets is None:
        return replace(weight, scales=scales, super_scales=super_scales)
    offsets, super_offsets = split(weight.offsets.abs(), torch.uint8)
    return replace(
        weight,
        scales=scales,
        offsets=offsets,
        super_scales=super_scales,
        super_offsets=-super_offsets,
    )


def random_weight(
    name: str, rows: int, columns: int, device: str = "cpu", seed: int = 0
) -> PackedWeight:
    """A weight with random codes; its numbers are about columns ** -0.5."""
    made, generator = FORMATS[name], torch.Generator(device).manual_seed(seed)
    kind, row_group = made["kind"], made.get("row_group", 1)
    group = made.get("group") or columns
    dtype = made.get("dtype", torch.float32)
    grid = -(-rows // row_group), -(-columns // group)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    spreads = {"fp8": 1.0, "int8": 74.0, "int4": 4.7, "fp4": 3.0, "int5": 9.3, "int6": 18.5}
    spread = spreads[kind] * columns**0.5
    if kind == "fp8":
        wide = torch.empty(rows, columns, device=device).normal_(generator=generator)
        values = wide.to(torch.float8_e4m3fn)
    elif kind == "int8":
        values = integers(-128, 128, rows, columns).to(torch.int8)
    else:
        values = integers(0, 256, rows, -(-columns // 2)).to(torch.uint8)
    high = None
    if kind in HIGH_BITS:
        codes = integers(0, 1 << HIGH_BITS[kind], rows, columns).to(torch.uint8)
        high = pack_bits(codes, HIGH_BITS[kind])
    factors = torch.empty(grid, device=device).uniform_(0.5, 1.5, generator=generator) / spread
    global_scale = None
    if dtype == torch.uint8:
        scales = integers(-2, 2, *grid).add(127 - int(torch.tensor(spread).log2())).byte()
    elif dtype == torch.float8_e4m3fn:
        scales = (factors * spread * 100).to(dtype)
        global_scale = torch.full((rows,), 0.01 / spread, device=device)
    else:
        scales = factors.to(dtype)
    zeros = integers(0, 17, *grid).to(torch.uint8) if made.get("zeros") else None
    offsets = None
    if made.get("offsets"):
        wide = torch.empty(grid, device=device).normal_(generator=generator)
        offsets = (wide * columns**-0.5).to(dtype)
    if made.get("super"):  # as GGUF's K types
        return _two_levels(
            PackedWeight(kind, values, factors, columns, group, offsets=offsets, high=high),
            made["super"],
        )
    return PackedWeight(
        *(kind, values, scales, columns, group, row_group, zeros, offsets, global_scale), high=high
    )
