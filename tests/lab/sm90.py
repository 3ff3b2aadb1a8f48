"""Compiles Triton kernels for sm_90a in place of launching them, on a machine without a GPU.

Tensors have no memory. A script sets `JITFunction.run` to `compile_instead` after it has activated
`NoDriver`; `done` counts the compilations of each kernel.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptx_version_from_options
from triton.compiler import code_generator
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from slipstream import kernels

SHARED_MEMORY = 232448  # bytes a block may use on an H100
BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64
done: dict[str, int] = {}
compiled: dict[str, Any] = {}  # the first form of each kernel
forms: set[object] = set()  # of all launches in the short test
original = JITFunction.run
every_form = True
LONG_TO_ASSEMBLE = ("_hopper_prefill_kernel",)  # only their shared memory is found out
EVERY_FORM = ("_attention_kernel", "_sparse_attention_kernel")  # their shared memory differs


# Triton writes a check of each sum and product of integers, and takes it out again unless a kernel
# is compiled for debugging. Without it, the kernels are the same and compile in four fifths of the
# time.
TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, operation: None


# For each node of a kernel's source, Triton changes Python's filters of warnings and changes them
# back, and for each call it derives the signature of the function anew.
_quiet = {"catch_warnings": nullcontext, "simplefilter": lambda *of: None}
code_generator.warnings = SimpleNamespace(**{**vars(warnings), **_quiet})
_signature = cache(inspect.signature)
code_generator.inspect = SimpleNamespace(
    **{**vars(inspect), "signature": lambda of: _signature(getattr(of, "__func__", of))}
)


class NoDriver:
    """The driver that the compiler queries, for a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Allocated(Exception):
    """Ends a compilation when the shared memory of the kernel is known."""

    def __init__(self, shared: int) -> None:
        super().__init__(shared)
        self.shared = shared


def allocate(self: Any, source: Any, metadata: Any, options: Any, capability: int) -> None:
    """In place of the stage of LLVM: its passes up to the allocation of shared memory."""
    manager = ir.pass_manager(source.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(options, self.target.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
    manager.run(source, "allocate")
    raise Allocated(source.get_int_attr("ttg.shared"))


def is_known(name: str, *arguments: object) -> bool:
    """Whether a launch of this kernel in the same form came before. Notes its form."""
    form = (name, form_of(arguments))
    known = form in forms
    forms.add(form)
    return known


def form_of(value: object) -> object:
    """What a kernel is compiled for in its arguments: types, what 16 divides, and constants."""
    match value:
        case torch.Tensor():
            return value.dtype, value.storage_offset() * value.element_size() % 16 == 0
        case dict():  # constants, and options of the compiler
            return tuple((key, form_of(each), str(each)) for key, each in value.items())
        case tuple():
            return tuple(map(form_of, value))
        case int() if not isinstance(value, bool):
            return value == 1, value % 16 == 0, abs(value) < 2**31
        case float() | bool() | str() | None:
            return type(value)
        case _:
            return object()  # equal to no other


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    name, kernel = self.fn.__name__, None
    if not every_form and (name in done and name not in EVERY_FORM or is_known(name, args, kwargs)):
        return None
    try:
        if (name in done or name in LONG_TO_ASSEMBLE) and not every_form:
            with patch.object(CUDABackend, "make_llir", allocate):
                shared = original(self, *args, grid=grid, warmup=True, **kwargs).metadata.shared
        else:
            kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
            shared = kernel.metadata.shared
    except Allocated as found:
        shared = found.shared
    assert shared <= SHARED_MEMORY, f"{name} wants {shared} bytes of shared memory"
    done[name] = done.get(name, 0) + 1
    compiled.setdefault(name, kernel)
    return kernel


def widest_load(kernel: Any, source: str) -> int:
    """The bytes of the widest load that a kernel compiled from the lines of one source file."""
    place, widest = "", 0
    for line in kernel.asm["ptx"].splitlines():
        if line.lstrip().startswith(".loc"):
            place = line.partition("//")[2].split(":")[0].strip()
        elif place == source and (load := re.search(r"ld\.global\.(?:v(\d)\.)?b(\d+)", line)):
            widest = max(widest, int(load[1] or 1) * int(load[2]) // 8)
    return widest


def t(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def module(name: str) -> Any:
    [path] = Path(next(iter(kernels.__path__))).glob(f"*/triton/{name}.py")
    room = path.parents[1].name
    return importlib.import_module(f"slipstream.kernels.{room}.triton.{name}")
