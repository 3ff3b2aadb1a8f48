"""No bound of a loop in a kernel depends on a variable that a loop around it carries.

Triton 3.6 compiles such loops wrongly: if nothing but the bounds of inner loops depends on the
variable, they get the value that it had before the outer loop. A producer of tiles once copied too
few steps of its second tile for this reason, and its consumers waited forever. Tests that run the
functions as Python cannot notice it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

from slipstream import kernels

Bounds: TypeAlias = Mapping[str, set[str | int]]  # function -> parameters, by name and by place
Function: TypeAlias = ast.FunctionDef


def names(nodes: Iterable[ast.AST], kind: type = ast.Name) -> set[str]:
    """The variables in some code, or those that it assigns if `kind` is `ast.Store`."""
    return set[str]().union(*(names_in(node, kind) for node in nodes))


@functools.cache
def names_in(node: ast.AST, kind: type) -> frozenset[str]:
    found = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return frozenset(each.id for each in found if kind is ast.Name or isinstance(each.ctx, kind))


@functools.cache
def calls_in(statement: ast.stmt) -> list[tuple[str, ast.Call]]:
    """The calls in a statement, with what each of them calls."""
    found = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
    return [(ast.unparse(call.func), call) for call in found]


def is_loop(node: ast.AST) -> bool:
    """Whether this is a loop that is not unrolled."""
    if not isinstance(node, ast.For) or not isinstance(node.iter, ast.Call):
        return False
    return ast.unparse(node.iter.func).rpartition(".")[2] == "range"


class Flow:
    """Follows through statements from which of the first variables each value is computed, and
    collects those that reach a bound of a loop."""

    def __init__(self, bounds: Bounds, first: Iterable[str]) -> None:
        self.bounds, self.reached = bounds, set[str]()
        self.sources = {name: {name} for name in first}

    def follow(self, statements: Iterable[ast.stmt]) -> set[str]:
        for statement in statements:
            self._follow(statement)
        return self.reached

    def _of(self, node: ast.AST) -> set[str]:
        return set().union(*(self.sources.get(name, set()) for name in names([node])))

    def _follow(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.For | ast.While):
            self._loop(statement)
        elif isinstance(statement, ast.If):
            self._branches([statement.body, statement.orelse], self._of(statement.test))
        else:
            for name, call in calls_in(statement):
                self._call(name, call)
            added = isinstance(statement, ast.AugAssign)
            for name in names([statement], ast.Store):
                before = self.sources.get(name, set()) if added else set()
                self.sources[name] = self._of(getattr(statement, "value", None) or statement)
                self.sources[name] |= before

    def _loop(self, loop: ast.For | ast.While) -> None:
        if isinstance(loop, ast.For):
            self.sources[ast.unparse(loop.target)] = of_bounds = self._of(loop.iter)
            if is_loop(loop):
                self.reached |= of_bounds
        for _ in range(2):  # what a turn computes may reach a bound in the next
            self._branches([loop.body, []], set())

    def _branches(self, ways: list[list[ast.stmt]], condition: set[str]) -> None:
        """Statements of which one list runs, chosen by a value."""
        before, after = self.sources, dict[str, set[str]]()
        for statements in ways:
            self.sources = dict(before)
            self.follow(statements)
            for name in names(statements, ast.Store):
                self.sources[name] = self.sources.get(name, set()) | condition
            for name, sources in self.sources.items():
                after[name] = after.get(name, set()) | sources
        self.sources = after

    def _call(self, name: str, call: ast.Call) -> None:
        matter = self.bounds.get(name, set())
        given: list[tuple[str | int | None, ast.expr]] = [*enumerate(call.args)]
        for place, value in [*given, *((each.arg, each.value) for each in call.keywords)]:
            if place in matter:
                self.reached |= self._of(value)


def functions_of(code: str) -> Iterator[Function]:
    """The functions that Triton compiles."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and any(
            ".jit" in ast.unparse(each) for each in node.decorator_list
        ):
            yield node


def parameters_in_bounds(functions: list[Function]) -> Bounds:
    """The parameters of each function that reach a bound of a loop, in it or in what it calls."""
    bounds: dict[str, set[str | int]] = {}
    while True:
        size = sum(map(len, bounds.values()))
        for function in functions:
            parameters = [each.arg for each in function.args.args]
            for name in Flow(bounds, parameters).follow(function.body):
                bounds.setdefault(function.name, set()).update((name, parameters.index(name)))
        if sum(map(len, bounds.values())) == size:
            return bounds


def carried_bounds(functions: list[Function]) -> list[tuple[str, str]]:
    """(function, variable) where a loop carries a variable on which a bound inside depends."""
    bounds = parameters_in_bounds(functions)
    return [
        (function.name, name)
        for function in functions
        for loop in ast.walk(function)
        if isinstance(loop, ast.For) and is_loop(loop)
        for name in sorted(Flow(bounds, names(loop.body, ast.Store)).follow(loop.body))
    ]


def test_no_kernel_has_a_bound_that_a_loop_carries() -> None:
    files = Path(next(iter(kernels.__path__))).rglob("*.py")
    functions = [each for file in files for each in functions_of(file.read_text())]
    assert {"produce", "consume"} < {each.name for each in functions}
    assert carried_bounds(functions) == []


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("first = 3\nfor t in range(n):\n for s in range(first, n): f(s)\n first = 0", "first"),
        ("a = 0\nfor t in range(n):\n for s in tl.range(n - a): f(s)\n a += 1", "a"),
        ("a = 0\nfor t in range(n):\n b = a + 1\n fill(b)\n a = t % 3", "a"),
        ("a = 0\nfor t in range(n):\n fill(count=a)\n a = t % 3", "a"),
        ("a = 0\nfor t in range(n):\n b = 0\n if a == 0:\n  b = n\n fill(b)\n a = t % 3", "a"),
        ("for t in range(n):\n first = 0\n if t == 0:\n  first = 3\n fill(first)", None),
        ("a = 0\nfor t in range(n):\n a = t % 3\n fill(a)", None),
        ("a = 0\nfor t in range(n):\n for s in range(n): a += 1", None),
        ("a = 0\nfor t in range(n):\n f(a)\n a += 1", None),
        ("a = 0\nfor t in gl.static_range(4):\n fill(a)\n a += 1", None),
    ],
)
def test_a_carried_bound_is_found(body: str, carried: str | None) -> None:
    inner = "@triton.jit\ndef fill(count):\n for s in range(count): f(s)\n"
    outer = "@triton.jit\ndef kernel(n):\n" + "".join(f" {line}\n" for line in body.split("\n"))
    found = carried_bounds(list(functions_of(inner + outer)))
    assert found == ([] if carried is None else [("kernel", carried)])
