"""Compiles the linear kernels for quantised weights for sm_90a without a GPU, as `compile_sm90`.

Without arguments it compiles each kernel and a few formats, with `more` further pairs of formats
and modes. With `all` it compiles every candidate of `measure_packed` and prints its registers,
spills and shared memory, with `experts` those of experts. With `chosen` it compiles what is chosen
for GGUF's types, and fails if a kernel spills.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import compile_linear
import sm90 as base
import torch
from compile_linear import compile_and_keep, kernels, resources
from disassembly import assemblies
from measure_packed import FORMATS, GGUF, ROWS, SHAPES, candidates, layer_call, tile_on_meta
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from slipstream.kernels import launch
from slipstream.kernels.device import Card, meta_tensors_on
from slipstream.kernels.linear.experts import PackedExperts
from slipstream.kernels.linear.linear_choice import Gemv, Shape, Skinny
from slipstream.kernels.packed.coded import Coding, code_rows, norm_and_code
from slipstream.kernels.packed.experts import packed_expert_parts
from slipstream.kernels.packed.grouped.triton.hopper_experts import forms_of
from slipstream.kernels.packed.grouped.triton.sort_rows import arrange
from slipstream.kernels.packed.kinds import Codes, Direct, PackedChoice, Row
from slipstream.kernels.packed.linear import (
    choose_packed,
    packed_gated_linear,
    packed_linear,
    packed_linear_parts,
)
from slipstream.kernels.packed.persistent.row_layer import multiply_row
from slipstream.kernels.packed.persistent.row_weights import RowLayer, fits_row_layer
from slipstream.kernels.quant.packed import PackedWeight
from slipstream.kernels.quant.tiled import tile


def meta(*shape: int, dtype: torch.dtype = base.BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def one(name: str, shape: Shape, choice: PackedChoice, rows: int) -> None:
    layer_call(shape, choice, meta(rows, shape.inputs), tile_on_meta(name, shape))


DISASSEMBLED = {"_direct_groups_kernel"} | {
    f"_hopper_{name}_kernel" for name in ("codes", "experts", "row")
}


def check_instructions() -> None:
    """Check that tiles come through TMA and are multiplied from registers, without spills."""
    chosen = [each.asm["cubin"] for each in kernels if each.metadata.name in DISASSEMBLED]
    codes = assemblies(chosen)
    for kernel in kernels:
        ptx, name = kernel.asm["ptx"], kernel.metadata.name
        code = next(codes) if name in DISASSEMBLED else ""
        before, wait, _ = ptx.partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in ptx, name
        # two tiles of gate and up of K types spill up to 32 bytes, and were measured as the fastest
        most = 32 if name == "_few_rows_kernel" else 0
        assert resources(kernel)[1] <= most, f"{name} spills: {resources(kernel)}"
        if name == "_packed_kernel":
            assert "cp.async.bulk.tensor" in ptx and "prefetch.global.L2" in before
            assert "wgmma.mma_async" in ptx
            # words are loaded as the left operand; no tile of numbers goes back to shared memory
            loads = kernel.asm["ttgir"].count("ttg.local_load")
            stores = kernel.asm["ttgir"].count("ttg.local_alloc %tiles")
            assert loads and not stores, f"{name} moves numbers through shared memory"
        if name == "_direct_groups_kernel":  # the warps meet at the end only
            assert code.count("BAR.SYNC") <= 2, "warps wait for each other"
        if name == "_few_rows_kernel":
            loop = kernel.asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
            assert "ttg.local" not in loop, "words pass through shared memory"
        if name in ("_packed_direct_kernel", "_direct_groups_kernel", "_few_rows_kernel"):
            assert before.count("ld.global") >= 4, "words are loaded before the input is ready"
            assert kernel.metadata.shared <= 2048, "words pass through shared memory"
        if name == "_coded_kernel":  # codes go from memory to the tensor cores
            assert "cp.async.bulk.tensor" in ptx and "prefetch.global.L2" in before
            assert "wgmma.mma_async" in ptx and "e4m3.e4m3" in ptx
            assert "ttg.local_load" not in kernel.asm["ttgir"], f"{name} loads codes"
        if name == "_hopper_codes_kernel":
            assert "QGMMA" in code and "USETMAXREG" in code and "LDL" not in code, name
            # the producer copies the first codes of weights before the input is ready
            assert "cp.async.bulk.tensor" in ptx.partition("griddepcontrol.launch_dependents")[0]
        if name == "_hopper_experts_kernel":
            assert "HGMMA" in code and "USETMAXREG" in code and "LDL" not in code, name
            assert "cp.async.bulk.tensor" in ptx, name
        if name == "_hopper_row_kernel":
            assert "HMMA" in code and "USETMAXREG" in code and "LDL" not in code, name
            assert "UTMALDG.4D" in code and "LDS.128" in code, name
            assert "red.release.gpu" in ptx and "trap" in ptx, name
            # one multiprocessor holds a program and a program of attention beside it
            assert kernel.metadata.shared <= 228 * 1024 - 1024 - 24 * 1024, name
        if name == "_packed_gemv_kernel":
            assert "ld.global" in before


def few(more: bool) -> None:
    """Compile each kernel, mode and way of scaling once; with `more`, further pairs of these."""
    gate_up, qkv = Shape("gate_up", 512, 1024), Shape("qkv", 512, 1024)
    one("fp8b", gate_up, Gemv(4, 1024, 4), 1)
    one("int8", qkv, Skinny(64, 128, 4, 4, 2, 16), 9)
    one("int4z", gate_up, Skinny(64, 256, 3, 4, 1, 16), 9)
    one("nvfp4", qkv, Skinny(64, 256, 4, 4, 2, 16), 9)
    one("fp8b", qkv, Row(16, 5, 4, 2), 1)
    one("int4", gate_up, Row(16, 3, 4, 1, 4, 0), 16)
    one("int4z", gate_up, Direct(1, 4, 2), 1)
    one("fp8", qkv, Direct(1, 4, 2), 1)
    one("fp8b", gate_up, Direct(2, 8, 1), 1)
    chosen(("q5k", gate_up, 1), ("q5k", gate_up, 64), ("q6k", qkv, 1))
    chosen(("q5k", qkv, 8), ("q6k", gate_up, 9))
    one("q5k", gate_up, Skinny(64, 128, 3, 4, 1, 16), 9)
    one("q6k", qkv, Skinny(64, 128, 4, 4, 2, 16), 9)
    chosen(("q4k", gate_up, 1), ("q4k", gate_up, 64), ("q8_0", qkv, 1))
    if more:
        one("int4z", gate_up, Row(16, 3, 4, 1), 1)
        one("int4", gate_up, Direct(1, 4, 2), 1)
        one("int4z", qkv, Direct(2, 4, 1, split_k=2), 1)
        experts("fp8b", QWEN, 8)
        experts("q4k", QWEN, 8)
    experts("int4z", QWEN, 1)
    experts("q5k", QWEN, 8)
    experts("nvfp4", QWEN, 64)
    for rows in (1, 17, 300):  # each form, and both ways of sorting rows
        narrow_experts(GPT_OSS, rows, whole=rows == 1)
    coded(512, 1024)
    for at, name in enumerate(("int4", "fp8")):
        row_layer(name, 512, 1024, 3584, (False, True) if more else (at % 2 > 0,))
        row_layer(name, 6144, 4096, 14336, [False], 4)
        if more:
            row_layer(name, 6144, 4096, 14336, [False], 2)
    one("fp8", qkv, Skinny(64, 128, 4, 4, 2, 16), 9)
    one("int4", qkv, Skinny(64, 256, 3, 4, 2, 128), 99)
    one("int4", gate_up, Skinny(128, 256, 2, 8, 1, 128), 99)
    check_instructions()
    subtractions = kernels[-1].asm["ptx"].count("sub.bf16x2")  # of 32 words of 4 codes a thread
    assert subtractions >= 2 * 2 * 32, "rounded numbers keep the constant of their codes"
    for code in assemblies([kernel.asm["cubin"] for kernel in kernels[-3:-1]]):
        products, waits = (code.count(of) for of in ("HGMMA", "WARPGROUP.DEPBAR"))
        assert waits <= products // 4, "it waits for each instruction of the tensor cores"
    choice = Row(16, 5, 4, 2)
    packed_linear(meta(1, 1024), tile_on_meta("int4", qkv), None, choice, None, meta(1, 512))
    assert not re.search(r"sub\.(rn\.)?bf16x2", kernels[-1].asm["ptx"]), "codes lose their constant"
    norm = meta(1024), 1e-5
    x, weight, residual = meta(9, 1024), tile_on_meta("fp8b", qkv), meta(9, 512)
    packed_linear(x, weight, None, Skinny(64, 128, 3, 4, 1, 16, norm=1), norm, residual)
    for name in ("fp8b", "int4z", "q4k", "q5k", "q6k", "nvfp4", "mxfp4"):
        packed_linear(x, tile_on_meta(name, qkv))
    block = replace(tile_on_meta("fp8b", Shape("o", 32, 32)), group=32)  # of all columns
    packed_linear(meta(20, 32), block, None, Skinny(64, 128, 4, 4, 1, 32))
    from slipstream.kernels.packed.triton.packed_tokens import quantise_rows, rescale

    row_scales = quantise_rows(meta(99, 1024), 1024)[1]
    code_rows(meta(99, 1024), Coding(1024, True, planar=True))
    rescale(meta(99, 512, dtype=base.I32), row_scales, meta(512), None, None, base.BF16)


def chosen(*cases: tuple[str, Shape, int]) -> None:
    """Compile the kernels that are chosen for a type of GGUF, a layer and a number of rows."""
    for name, shape, rows in cases:
        choice = choose_packed(tile_on_meta(name, shape), shape.role, rows)
        assert isinstance(choice, Direct | Skinny) and (rows <= 16 or isinstance(choice, Skinny))
        one(name, shape, choice, rows)


def all_chosen() -> None:
    """Compile every kernel that is chosen for a type of GGUF, without spills."""
    roles = Shape("gate_up", 28672, 4096), Shape("qkv", 6144, 4096), Shape("head", 128256, 4096)
    for name in GGUF:
        chosen(*((name, shape, rows) for shape in roles for rows in (1, 8, 16, 32, 64)))
        check_instructions()
        kernels.clear()


def coded(outputs: int, inputs: int) -> None:
    """Compile what a layer with 8-bit activations launches, in each form."""
    half, norm = inputs, (meta(inputs), 1e-5)
    for name in ("fp8", "fp8b"):
        by_group = int(name == "fp8b")
        gate_up, down = Shape("gate_up", 2 * half, inputs), Shape("down", outputs, half)
        wide, parts = (
            Codes(128, 128, 4, 8, 1, 64, by_group),
            Codes(64, 128, 6, 4, 2, 16, 1),
        )
        x, _ = norm_and_code(
            meta(2, 9, inputs, dtype=torch.float32),
            meta(9, inputs),
            *norm,
            Coding(inputs, by_group > 0),
        )
        weight = tile_on_meta(name, gate_up)
        act = packed_gated_linear(
            x, weight, None, "silu", wide, None, base.BF16, Coding(half, True)
        )
        assert act.dtype == torch.uint8
        packed_linear_parts(act, tile_on_meta(name, down), None, parts, None, base.BF16)
        packed_linear(meta(9, half), tile_on_meta(name, down), None, parts)  # codes its input
        height, width = (128, 128) if name == "fp8" else (64, 64)  # with roles of warps
        wide = Codes(width, 128, 4, 4, 1, height, by_group, 0, roles=1)
        packed_gated_linear(x, weight, None, "silu", wide, None, base.BF16, Coding(half, True))
        if name == "fp8":
            wide = replace(wide, joined=1)
            packed_gated_linear(x, weight, None, "silu", wide, None, base.BF16)
            parts = Codes(128, 128, 6, 4, 2, 128, 1, 0, roles=1)
            packed_linear_parts(act, tile_on_meta(name, down), None, parts, None, base.BF16)


def row_layer(
    name: str, outputs: int, hidden: int, inner: int, lasts: Iterable[bool], rows: int = 1
) -> None:
    """Compile the launch between two attentions of few rows, or after the last one (`lasts`)."""
    shapes = ((hidden, hidden), (2 * inner, hidden), (hidden, inner), (outputs, hidden))
    weights = [tile_on_meta(name, Shape("other", *shape)) for shape in shapes]
    norm = meta(hidden), 1e-5
    layer = RowLayer(*weights, norm, norm)
    assert fits_row_layer(layer, base.BF16, torch.device("meta"))
    for is_last in lasts:
        own = replace(layer, qkv=None, next_norm=None) if is_last else layer
        counter = meta(1, dtype=base.I32)
        stream, following = multiply_row(meta(rows, hidden), meta(rows, hidden), own, counter)
        assert stream.shape == (rows, hidden) and (following is None) == (own.qkv is None)


QWEN, GPT_OSS = (128, 2048, 768, 8), (32, 2880, 2880, 4)  # Qwen3-30B-A3B, gpt-oss-20b


def experts(name: str, sizes: tuple[int, int, int, int], rows: int) -> None:
    """Compile the kernels of a layer: (experts, hidden, inner size, experts of a row)."""
    count, hidden, inner, top_k = sizes
    stacks = [
        tile_on_meta(name, Shape("other", outputs, inputs))
        for outputs, inputs in ((count * 2 * inner, hidden), (count * hidden, inner))
    ]
    ids = meta(rows, top_k, dtype=base.I32)
    weights = meta(rows, top_k, dtype=torch.float32)
    packed_expert_parts(meta(rows, hidden), PackedExperts(*stacks, count), weights, ids)


def narrow_experts(sizes: tuple[int, int, int, int], rows: int, whole: bool = True) -> None:
    """Compile the kernels of a layer of gpt-oss on Hopper, with sizes as in `experts`.

    Unless `whole`, the products are compiled only until their shared memory is known, which takes
    a fraction of the time, and `check_instructions` does not see them: gate and up of 300 rows
    spill 8 bytes, which `compile_packed.py experts` prints.
    """
    count, hidden, inner, top_k = sizes
    stacks = []
    for outputs, inputs in ((count * 2 * inner, hidden), (count * hidden, inner)):
        codes, scales = (
            meta(outputs, inputs // size, dtype=torch.uint8)
            for size in (2, 32)  # two codes a byte, and 32 to a scale
        )
        stacks.append(tile(PackedWeight("fp4", codes, scales, inputs, 32), narrow=True))
    ids, weights = meta(rows, top_k, dtype=base.I32), meta(rows, top_k, dtype=torch.float32)
    biases = meta(count, 2 * inner), meta(count, hidden)
    of = PackedExperts(*stacks, count, *biases, "clamped_swiglu")
    arrange(meta(rows, hidden), weights, ids, count, forms_of(rows, top_k, count)[0].block_m)
    before, seen = base.done.get("_hopper_experts_kernel", 0), len(kernels)
    stage = nullcontext() if whole else patch.object(CUDABackend, "make_llir", base.allocate)
    with stage:
        packed_expert_parts(meta(rows, hidden), of, weights, ids)
    assert base.done["_hopper_experts_kernel"] == before + 2
    if not whole:  # Triton's cache may have had them whole
        del kernels[seen:]


def all_experts() -> None:
    """Print what the kernels of experts need, by format and number of rows."""
    for rows in (1, 17, 300):
        compile_linear.report(f"narrow mxfp4 {rows} rows", narrow_experts, GPT_OSS, rows)
    for name in FORMATS:
        for rows in (1, 8, 64, 128, 256, 8192):
            compile_linear.report(f"{name} {rows} rows", experts, name, QWEN, rows)


def everything() -> None:
    seen: set[Any] = set()
    for rows in ROWS:
        for shape in SHAPES[:3]:
            for name in FORMATS:
                for choice in candidates(name, shape, rows):
                    key = name, shape.may_split, choice
                    if key not in seen and (
                        not isinstance(choice, Skinny | Row) or choice.split_k == 1
                    ):
                        seen.add(key)
                        compile_linear.report(
                            f"{name} {shape} {rows} rows {choice}", one, name, shape, choice, rows
                        )


if __name__ == "__main__":
    driver.set_active(base.NoDriver())
    JITFunction.run = compile_and_keep
    with meta_tensors_on(Card("NVIDIA H200", (9, 0), 132)):
        assert launch.pdl_options(meta(1))["PDL"]
        if sys.argv[1:] == ["all"]:
            everything()
        elif sys.argv[1:] == ["chosen"]:
            all_chosen()
        elif sys.argv[1:] == ["experts"]:
            all_experts()
        else:
            few(sys.argv[1:] == ["more"])
            for name, count in base.done.items():
                print(name, count)
