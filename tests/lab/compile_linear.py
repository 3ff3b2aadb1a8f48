"""Compiles the linear kernels for sm_90a without a GPU, as `compile_sm90` does.

Without arguments it compiles each kernel and mode once. With `all` it compiles every choice of the
built-in table and prints its registers, spills and shared memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sm90 as base
import torch
from disassembly import TOOLS, assemblies
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from slipstream.kernels import launch
from slipstream.kernels.attention.paged_rows import AttentionRule, Fp8Cache, PagedRows
from slipstream.kernels.linear.linear_choice import (
    GATE_UP,
    H100_WINNERS,
    PARTS,
    PLAIN,
    SAMPLE,
    Choice,
    Gemv,
    Shape,
    Skinny,
    Wide,
    default_choice,
)
from slipstream.kernels.linear.rotation import Rotation

kernels: list[Any] = []
t = base.t


def compile_and_keep(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    kernel = base.compile_instead(self, *args, grid=grid, warmup=warmup, **kwargs)
    if kernel is not None:
        kernels.append(kernel)
    return kernel


def meta(*shape: int, dtype: torch.dtype = base.BF16) -> torch.Tensor:
    """A large tensor without memory of that size: a launch needs only its type and alignment."""
    return torch.empty_strided(shape, (0,) * len(shape), dtype=dtype)


class Weights(torch.Tensor):
    """A matrix that claims to be contiguous although all its rows share memory."""

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        strides = (self.shape[1], 1)
        return strides if dim is None else strides[dim]


def weights(outputs: int, inputs: int) -> Any:
    return meta(outputs, inputs).as_subclass(Weights)


def one(shape: Shape, choice: Choice, num_rows: int, options: dict[str, Any]) -> None:
    """Compile the kernels that a model runs for this layer."""
    from slipstream.kernels.linear.triton import gemv, skinny

    x, weight = t(num_rows, shape.inputs), weights(shape.outputs, shape.inputs)
    bias = t(shape.outputs) if options.get("bias") else None
    if isinstance(choice, Gemv):
        norm = (t(shape.inputs), 1e-5) if shape.role in ("qkv", "gate_up") else None
        if shape.role == "head":
            gemv.multiply(x, weight, choice)
            head = head_rows(1, options.get("noise", False))
            gemv.multiply(x, weight, choice, SAMPLE, head=head)
            head.finish()
        elif shape.role == "gate_up":
            gemv.multiply(x, weight, choice, GATE_UP, bias, norm=norm)
        else:
            residual = t(1, shape.outputs) if shape.role in ("o", "down") else None
            gemv.multiply(x, weight, choice, PLAIN, bias, norm=norm, residual=residual)
    elif isinstance(choice, Skinny):
        tma = options.get("tma", True)
        if shape.role == "head":
            skinny.multiply(x, weight, choice, tma=tma)
            head = head_rows(num_rows, options.get("noise", False))
            skinny.multiply(x, weight, choice, SAMPLE, head=head, tma=tma)
            head.finish()
        elif shape.role == "gate_up":
            skinny.multiply(x, weight, choice, GATE_UP, bias, tma=tma)
        else:
            skinny.multiply(x, weight, choice, PARTS, bias, tma=tma)


def head_rows(rows: int, noise: bool) -> Any:
    from slipstream.kernels.linear.triton.head_sample import HeadRows

    longs, temperature = t(rows, dtype=base.I64), t(rows, dtype=torch.float32)
    columns = (longs, longs, t(rows, dtype=torch.bool), temperature) if noise else (None,) * 4
    return HeadRows(rows, torch.device("cpu"), *columns, 3)


def resources(kernel: Any) -> tuple[int, int]:
    """Find a compiled kernel's (registers, bytes of spills)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def parts_of(num_parts: int) -> None:
    """Compile the kernels that sum parts: norm, and rotary embedding in its forms."""
    norm = base.module("norm_rope")
    norm.fused_add_rms_norm(t(num_parts, 16, 4096, dtype=torch.float32), t(16, 4096), t(4096), 1e-5)
    positions, cos_sin = t(16, dtype=base.I64), t(64, 128, dtype=torch.float32)
    qkv = t(num_parts, 16, 48, 128, dtype=torch.float32).split([32, 8, 8], dim=2)
    rotation = Rotation(positions, cos_sin)
    norm.rotary_store_kv(*qkv, rotation, t(2, 9, 16, 8, 128), positions)
    whole = t(16, 48, 128).split([32, 8, 8], dim=1)
    norm.rotary_store_kv(*whole, rotation, t(2, 9, 16, 8, 128), positions, halves=(32, 2))
    normed = replace(rotation, norms=(t(128), t(128), 1e-6))
    norm.rotary_qkv(*qkv, normed, base.BF16)


def rotary_attention(more: bool) -> None:
    """Compile the fused rotary attention kernel for different tiles and forms of input.

    With `more`, this includes sums of parts that attend to a cache in fp8."""
    norms, windowed = (t(128), t(128), 1e-6), {"sliding_window": 9, "softcap": 50.0}
    cases: list[tuple[int, int, int, int, int, dict[str, Any], dict[str, Any]]] = [
        (128, 8, 4, 1, 0, {}, {}),
        (128, 2, 8, 4, 4, {"norms": norms}, windowed),
        (80, 3, 3, 1, 2, {"interleaved": True}, {}),
        (64, 3, 3, 4, 0, {"norms": (t(64), t(64), 1e-6)}, {"fp8": Fp8Cache(base.BF16, 0.5, 0.5)}),
    ]
    if more:
        cases.append((128, 8, 4, 1, 2, {}, {"fp8": Fp8Cache(base.BF16)}))
    for dim, heads, group, queries, parts, turn, limits in cases:
        shape = (4 * queries, heads * (group + 2), dim)
        qkv = t(parts, *shape, dtype=torch.float32) if parts else t(*shape)
        sections = qkv.split([heads * group, heads, heads], dim=-2)
        cache, table = t(2, 9, 16, heads, dim), t(4, 256, dtype=base.I32)
        slots, angles = t(4 * queries, dtype=base.I64), t(64, dim, dtype=torch.float32)
        starts, lens, arrivals = (t(count, dtype=base.I32) for count in (5, 4, 64))
        rows = PagedRows(table, starts, lens, queries, slots, arrivals)
        rotation, rule = Rotation(slots, angles, **turn), AttentionRule(scale=0.1, **limits)
        if rule.fp8 is not None:
            cache = cache.to(torch.float8_e4m3fn)
        plan = base.module("attention_plan").plan_for(sections[0], cache, rows, rule)
        assert plan.fused
        plan = replace(plan, early=dim == 128, heads_first=queries > 1)
        run = base.module("rotary_attention").rotary_attention
        run(*sections, rotation, cache, rows, rule, plan)


def of_many_rows() -> None:
    """Compile products of many rows: with an activation, and plain with a late consumer."""
    from slipstream.kernels.linear.wide.triton.hopper_product import multiply

    for choice, activation in ((Wide(), "silu"), (Wide(128, 6, lag=1), None)):
        multiply(t(300, 4096), t(28672, 4096), choice, activation, programs=132)
        registers, spilled = resources(kernels[-1])
        assert (registers, spilled) == (168, 0), f"{choice} spills {spilled} bytes"
        # The products of a step must follow each other without a wait: two consumers have four for
        # whole tiles and four for halves.
        (code,) = assemblies([kernels[-1].asm["cubin"]])
        products = re.findall(r"\bHGMMA\.64x(\d+)x16\S* [^;]*?(gsb0)?\s*;", code)
        sizes = [str(choice.block_n), str(choice.block_n // 2)]
        assert sorted(size for size, _ in products) == sorted(sizes * 8), products
        assert sum(waits == "gsb0" for _, waits in products) == 4, products


def check_instructions() -> None:
    """Check that weights are the left operand of wgmma, use TMA, and load before the wait."""
    for kernel in kernels:
        ptx, name = kernel.asm["ptx"], kernel.metadata.name
        before, wait, _ = ptx.partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in ptx, name
        # attention of an fp8 cache by one warp needs a few registers more than there are
        allowed = 32 if re.search(r"cvt\.\S*e4m3", ptx) else 0
        assert resources(kernel)[1] <= allowed, f"{name} spills {resources(kernel)[1]} bytes"
        if name == "_skinny_kernel":
            assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
            assert "prefetch.global.L2" in before
        if name == "_gemv_kernel":
            assert "ld.global" in before


def few(more: bool) -> None:
    """Compile each kernel and mode once; with `more`, further pairs of modes."""
    for role in ("qkv", "o", "gate_up", "head"):
        shape = Shape(role, 256, 192)
        one(shape, Gemv(4, 128, 4), 1, {"bias": True, "noise": True})
        one(shape, Skinny(64, 64, 3, 4, 1 + shape.may_split, 16), 9, {"bias": True, "noise": True})
    rotary_attention(more)
    check_instructions()
    of_many_rows()
    one(Shape("down", 256, 192), Skinny(64, 64, 3, 4, 3, 32), 20, {"tma": False})
    one(Shape("head", 256, 192), Gemv(4, 64, 4, 4), 1, {})
    parts_of(2)


def everything() -> None:
    """Compile the built-in table and the rule for other shapes; print what each needs."""
    cases = [(shape, choice, rows) for (shape, rows), choice in H100_WINNERS.items()]
    for shape in (Shape("qkv", 3072, 2048), Shape("gate_up", 16384, 2048), Shape("o", 2048, 2048)):
        cases += [(shape, default_choice(shape, rows), rows) for rows in (1, 16, 32, 64)]
    for shape, choice, rows in cases:
        for options in ({}, {"noise": True}) if shape.role == "head" else ({},):
            report(
                f"{shape} {rows} rows {choice} {options or ''}", one, shape, choice, rows, options
            )
    for num_parts in (2, 3, 4):
        report(f"{num_parts} parts", parts_of, num_parts)


def report(name: str, run: Callable[..., None], *args: Any) -> None:
    kernels.clear()
    run(*args)
    for kernel in kernels:
        registers, spills = resources(kernel)
        mark = "  SPILLS" if spills else ""
        needs = f"{registers} registers, {spills} B stack, {kernel.metadata.shared} B shared"
        print(f"{kernel.metadata.name}: {name}: {needs}{mark}", flush=True)


if __name__ == "__main__":
    driver.set_active(base.NoDriver())
    JITFunction.run = compile_and_keep
    launch._is_hopper = lambda device: True
    if sys.argv[1:] == ["all"]:
        everything()
    else:
        few(sys.argv[1:] == ["more"])
        for name, count in base.done.items():
            print(name, count)
