"""Repairs and speeds up Triton's interpreter, in which kernels run without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as language
from triton.runtime import interpreter


def patch() -> None:
    """Change the interpreter for the rest of the process; it computes what it did before.

    Most of its time is not in arithmetic but in its own bookkeeping for each operation."""
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
