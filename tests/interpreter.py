"""Repairs and speeds up Triton's interpreter, in which kernels run without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as language
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

elsewhere: list[torch.Tensor] = []  # what a test's kernels reach by addresses in a table


class OutOfBounds(AssertionError):
    """A kernel reads or writes memory that belongs to none of its arguments."""


def patch() -> None:
    """Change the interpreter for the rest of the process: it computes what it did before, but
    raises `OutOfBounds` (inside its own InterpreterError) where a GPU might fault.

    Most of its time is not in arithmetic but in its own bookkeeping for each operation."""
    if hasattr(interpreter, "_bounds_of_launch"):
        return
    _check_bounds()
    _accept_bounds_of_loops()
    _patch_language_once()
    _derive_types_of_tuples_late()
    _keep_dtypes()


def _accept_bounds_of_loops() -> None:
    """numpy 2.4 converts only 0-d arrays to integers, but Triton 3.6 passes the bounds of a loop as
    arrays with one element."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _patch_language_once() -> None:
    """The interpreter patches Triton's language anew for each launch and each call of a function
    in a kernel, which takes longer than most such calls."""
    everywhere = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    interpreter._patch_lang(everywhere)
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: nothing


def _derive_types_of_tuples_late() -> None:
    """Each tensor holds its shape as a tuple, but almost nothing reads the type of that tuple."""
    of_triton = language.core.tuple.__init__

    def init(self: Any, args: Sequence[Any], type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            of_triton(self, args, type)

    late = cached_property(lambda self: language.core._type_for_tuple_values(self.values))
    late.__set_name__(language.core.tuple, "type")
    language.core.tuple.type = late
    language.core.tuple.__init__ = init


def _keep_dtypes() -> None:
    """The interpreter makes its table of NumPy's types anew each time that it looks one up."""
    of_scalar, of_pointer = cache(interpreter._get_np_dtype), np.dtype(np.uint64)

    def np_dtype(of_triton: Any) -> Any:
        scalar = of_triton.scalar
        return of_pointer if scalar.is_ptr() else of_scalar(scalar)

    interpreter._get_np_dtype = np_dtype


def _check_bounds() -> None:
    """Let every load, store and atomic operation check that its pointers, where its mask is set,
    are in the storages of the launch's arguments.

    On a GPU such a read is silent unless it leaves mapped memory, which the allocator decides."""
    builder, of_arguments = interpreter.InterpreterBuilder, interpreter.GridExecutor._init_args_hst
    interpreter._bounds_of_launch = bounds = []

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        found = of_arguments(self, args, kwargs)
        bounds[:] = sorted(set(_storages((*found[0], *found[1].values(), *elsewhere))))
        return found

    interpreter.GridExecutor._init_args_hst = init_args
    for name, mask_at in (
        ("create_masked_load", 1),
        ("create_masked_store", 2),
        ("create_atomic_rmw", 3),
    ):
        setattr(builder, name, _checked(getattr(builder, name), mask_at, bounds))


def _storages(arguments: Iterable[Any]) -> list[tuple[int, int]]:
    """The first address of each storage among a launch's arguments, and the one after its last."""
    found: list[tuple[int, int]] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            found += _storages(argument)
        elif isinstance(argument, TensorDescriptor):
            found += _storages([argument.base])
        elif isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found


def _checked(operation: Any, mask_at: int, bounds: list[tuple[int, int]]) -> Any:
    """An operation of the interpreter's builder whose pointers are checked first. Its first
    argument that has pointers is the pointers; number `mask_at` is the mask."""

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        pointers = args[1] if mask_at == 3 else args[0]
        mask = np.broadcast_to(args[mask_at].data, pointers.data.shape).astype(bool)
        live = pointers.data[mask]
        if live.size:
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            low, high = int(live.min()), int(live.max()) + size
            if not any(first <= low and high <= end for first, end in bounds):
                _refuse_foreign(live.astype(np.int64), size, bounds)
        return operation(self, *args, **kwargs)

    return checked


def _refuse_foreign(live: Any, size: int, bounds: list[tuple[int, int]]) -> None:
    """Raise OutOfBounds unless each pointer is within some argument."""
    inside = np.zeros(live.shape, dtype=bool)
    for first, end in bounds:
        inside |= (first <= live) & (live + size <= end)
    if not inside.all():
        wrong = int(live[~inside][0])
        first, end = min(bounds, key=lambda span: abs(wrong - span[0]))
        raise OutOfBounds(
            f"{(~inside).sum()} of {live.size} pointers are in no argument; the first is at byte "
            f"{wrong - first} of one with {end - first} bytes"
        )
