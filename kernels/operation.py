"""Makes an operation of a plain-torch reference and a Triton version, chosen by device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar, cast

from .device import use_triton

P = ParamSpec("P")
R = TypeVar("R")


def operation(
    reference: Callable[P, R], by: str, triton: str, only_if: Callable[..., bool] | None = None
) -> Callable[P, R]:
    """The operation that `reference` defines; where Triton runs, its Triton version computes it.

    `reference` is named after the operation and ends in "_reference". `by` names a tensor among its
    arguments, such as "x" or "rows.logits", which tells the device. `triton` is the module of the
    Triton version, relative to the reference's folder; it is imported at the first use. There the
    function has the operation's name and takes the same arguments. `only_if` says for which
    arguments there is a Triton version; None means for all.
    """
    name = reference.__name__.removesuffix("_reference")
    package = reference.__module__.rpartition(".")[0]
    argument, _, attribute = by.partition(".")
    place = list(inspect.signature(reference).parameters).index(argument)
    tensor_of = attrgetter(attribute) if attribute else None

    @cache
    def load() -> Callable[P, R]:
        return cast(Callable[P, R], getattr(import_module(triton, package), name))

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        value: Any = args[place] if place < len(args) else kwargs[argument]
        fits = only_if is None or only_if(*args, **kwargs)
        if fits and use_triton(value if tensor_of is None else tensor_of(value)):
            return load()(*args, **kwargs)
        return reference(*args, **kwargs)

    run.__name__ = run.__qualname__ = name
    return run
