"""Every operation can hand its arguments to its Triton version as they are."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
pytestmark = pytest.mark.usefixtures("triton_interpreter")


def operations() -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Each operation that `kernels.operation` has made, and its Triton version."""
    for path in sorted(KERNELS.rglob("*.py")):
        parts = path.relative_to(KERNELS).with_suffix("").parts
        if {"triton", "cpu"} & set(parts):
            continue
        module = importlib.import_module(".".join(("slipstream.kernels", *parts)))
        for value in vars(module).values():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                load = inspect.getclosurevars(value).nonlocals.get("load")
                if load is not None and hasattr(value, "__wrapped__"):
                    yield value, load()


def arguments_of(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The names of a function's parameters and their defaults, in order."""
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default) for parameter in parameters]


def test_the_versions_of_an_operation_take_the_same_arguments() -> None:
    found = list(operations())
    assert len(found) > 40
    for public, triton in found:
        expected, given = arguments_of(public), arguments_of(triton)
        assert triton.__name__ == public.__name__ and given[: len(expected)] == expected, public
        assert all(default is not inspect.Parameter.empty for _, default in given[len(expected) :])
