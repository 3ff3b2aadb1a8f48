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
    _keep_shapes()
    _keep_promotions()
    _leave_equal_types()
    _check_sizes_once()
    _compute_no_unread_overflow()


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
    of_builtin = language.core.builtin(lambda: None).__code__

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        if member.__code__ is of_builtin:  # it only checks that there is a `_semantic`
            member = member.__wrapped__

        def with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, with_semantic)

    interpreter._patch_attr = patch_attr
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

    _late(
        language.core.tuple, "type", lambda self: language.core._type_for_tuple_values(self.values)
    )
    language.core.tuple.__init__ = init


def _keep_dtypes() -> None:
    """The interpreter makes its table of NumPy's types anew each time that it looks one up, and
    finds the type of a name by comparing it with all names."""
    of_scalar, of_pointer = cache(interpreter._get_np_dtype), np.dtype(np.uint64)

    def np_dtype(of_triton: Any) -> Any:
        scalar = of_triton.scalar
        return of_pointer if scalar.is_ptr() else of_scalar(scalar)

    interpreter._get_np_dtype = np_dtype
    core, to_ir, known = language.core, language.core.dtype.to_ir, {}

    def to_ir_once(self: Any, builder: Any) -> Any:
        if self.name not in known:
            known[self.name] = to_ir(self, builder)
        return known[self.name]

    def equal(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = core._unwrap_if_constexpr(other)
        return isinstance(other, core.dtype) and self.name == other.name

    core.dtype.to_ir, core.dtype.__eq__ = to_ir_once, equal


def _keep_shapes() -> None:
    """Each tensor makes its shape, and each type of tensors its shape and its name, in objects of
    Triton. Here types of one shape share them, and what is seldom read is made when it is read."""
    core = language.core
    constexpr, lists = core.constexpr, (list, core.tuple)
    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type}

    def unwrap_fast(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    def init_constexpr(self: Any, value: Any) -> None:
        while isinstance(value, constexpr):
            value = value.value
        self.value = value

    @cache
    def shape_of_type(sizes: tuple[int, ...]) -> tuple[Any, int, Any]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        number = core.validate_block_shape(sizes)
        return core.tuple(sizes), number, core.tuple([constexpr(size) for size in sizes])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, lists)
        self.element_ty = element_ty
        sizes = tuple([unwrap_fast(size) for size in shape])
        self.shape, self.numel, self.shape_of_tensors = shape_of_type(sizes)

    def with_element(self: Any, element_ty: Any) -> Any:
        known = self.__dict__.setdefault("of_other_elements", {})
        if id(element_ty) not in known:
            known[id(element_ty)] = core.block_type(element_ty, self.shape)  # which keeps it alive
        return known[id(element_ty)]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape = type.shape_of_tensors if type.is_block() else scalar

    core._unwrap_if_constexpr = unwrap_fast
    constexpr.__init__ = init_constexpr
    _late(constexpr, "type", lambda self: core.constexpr_type(self.value))
    scalar = core.tuple([])
    core.block_type.__init__, core.block_type.with_element_ty = init_block, with_element
    _late(core.block_type, "name", lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = init_tensor
    _late(
        core.tensor,
        "numel",
        lambda self: constexpr(self.type.numel if self.type.is_block() else 1),
    )


def _late(owner: Any, name: str, make: Any) -> None:
    """Let an attribute of a class be made when it is first read."""
    late = cached_property(make)
    late.__set_name__(owner, name)
    setattr(owner, name, late)


def _keep_promotions() -> None:
    """The type of a sum or a product depends only on those of its operands."""
    semantic = interpreter.TritonSemantic
    impl, known = semantic.computation_type_impl, {}

    def promoted(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, division: bool) -> Any:
        key = (a.name, a_scalar, b.name, b_scalar, division)
        if key not in known:
            known[key] = impl(self, a, a_scalar, b, b_scalar, division)
        return known[key]

    semantic.computation_type_impl = promoted


def _leave_equal_types() -> None:
    """Most operands have the same shape, so that none is to be broadcast, and many the same type,
    which is then that of their sum or product. Nor does an offset change the type of a pointer.
    Where a number takes the type of the other operand, it is converted once."""
    semantic, tensor = interpreter.TritonSemantic, language.core.tensor
    broadcast_of_triton = semantic.broadcast_impl_value
    check_of_triton = semantic.binary_op_type_checking_impl
    kept = {"fp32", "fp64", "int1", "int8", "int16", "int32", "int64"}
    kept |= {"uint8", "uint16", "uint32", "uint64"}
    constants: dict[Any, Any] = {}  # numbers as arrays, None if they change the other's type

    def splat(scalar: Any, block: Any) -> Any:
        """The number of a handle in each place of a block."""
        kind = block if scalar.dtype is block.element_ty else block.with_element_ty(scalar.dtype)
        data = np.full(block.shape.values, scalar.data, interpreter._get_np_dtype(scalar.dtype))
        return tensor(interpreter.TensorHandle(data, scalar.dtype), kind)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if blocks == (True, True):
            if lhs.type.shape.values == rhs.type.shape.values:
                return lhs, rhs
        elif blocks == (False, False):
            return lhs, rhs
        elif blocks == (True, False) and rhs.handle.dtype is rhs.dtype:
            return lhs, splat(rhs.handle, lhs.type)
        elif blocks == (False, True) and lhs.handle.dtype is lhs.dtype:
            return splat(lhs.handle, rhs.type), rhs
        return broadcast_of_triton(self, lhs, rhs)

    def constant(self: Any, value: Any, other: Any, *options: Any) -> Any:
        """A number as an operand of a tensor, None if that has to change its type."""
        dtype = other.dtype
        if dtype.name not in kept:
            return None
        key = type(value), value, dtype.name, options
        if key not in constants:
            zero = self.scalar_constant(0, dtype)
            left, right = check_of_triton(self, zero, value, *options)
            same = left.dtype == right.dtype == dtype
            constants[key] = right.handle.data if same else None
        if constants[key] is None:
            return None
        handle = interpreter.TensorHandle(constants[key], dtype)
        return splat(handle, other.type) if other.type.is_block() else tensor(handle, dtype)

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        left_pointer: bool = False,
        right_pointer: bool = False,
        arithmetic: bool = True,
        division: bool = False,
    ) -> Any:
        kinds = type(lhs), type(rhs)
        if kinds == (tensor, tensor):
            left, right = lhs.dtype, rhs.dtype
            if left is right and left.name in kept:
                return broadcast(self, lhs, rhs)
            if left_pointer and left.is_ptr() and right.is_int():
                return broadcast(self, lhs, rhs)
        elif kinds[0] is tensor and kinds[1] in (int, float):
            found = constant(self, rhs, lhs, False, False, arithmetic, division)
            if found is not None:
                return lhs, found
        elif kinds[1] is tensor and kinds[0] in (int, float):
            found = constant(self, lhs, rhs, False, False, arithmetic, division)
            if found is not None:
                return found, rhs
        return check_of_triton(self, lhs, rhs, left_pointer, right_pointer, arithmetic, division)

    semantic.broadcast_impl_value = broadcast
    semantic.binary_op_type_checking_impl = check


def _check_sizes_once() -> None:
    """Each array's element must fit its type of Triton, which a comparison of numbers shows."""
    handle, pointer = interpreter.TensorHandle, language.core.pointer_type
    refuse = handle.__post_init__

    def post_init(self: Any) -> None:
        size, dtype = self.data.itemsize, self.dtype
        if size > 1 and not isinstance(dtype, pointer) and 8 * size > dtype.primitive_bitwidth:
            refuse(self)

    def binary_op(self: Any, lhs: Any, rhs: Any, operation: Any) -> Any:
        result, dtype = operation(lhs.data, rhs.data), lhs.dtype.scalar
        size = result.itemsize
        if size > 1 and not isinstance(dtype, pointer) and 8 * size > dtype.primitive_bitwidth:
            result = result.astype(interpreter._get_np_dtype(dtype))
        return handle(result, dtype)

    handle.__post_init__ = post_init
    interpreter.InterpreterBuilder.binary_op = binary_op


def _compute_no_unread_overflow() -> None:
    """Without its debug option, which the tests leave off, the interpreter computes each sum and
    product of integers again in 64 bits, compares it with bounds, and does nothing with the
    result."""
    semantic = interpreter.TritonSemantic
    impl = semantic.binary_op_sanitize_overflow_impl

    def sanitize(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:
            impl(self, lhs, rhs, operation)

    semantic.binary_op_sanitize_overflow_impl = sanitize


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
