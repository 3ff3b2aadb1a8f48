"""Graphs on the CPU: torch operations are recorded without being executed, and replayed later.

They replace CUDA graphs in tests of capture, padding and stale state. Python code runs once, at
capture; torch operations run at each replay. Values computed during a capture are poison, and
reading a value on the host raises an error, as it does in a CUDA capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.runner.graphs.capture import Graph

_aten = torch.ops.aten


class _Kind(Enum):
    HOST_READ = auto()
    ALLOCATES = auto()  # and does nothing else; a CUDA graph has no node for it either
    CONSTANT = auto()
    WRITES = auto()
    PURE = auto()


# of operations; those that are not listed here are added when they are first recorded
_kinds: dict[Any, _Kind] = {
    _aten.empty.memory_format: _Kind.ALLOCATES,
    _aten.empty_strided.default: _Kind.ALLOCATES,
    _aten.new_empty.default: _Kind.ALLOCATES,
    _aten.new_empty_strided.default: _Kind.ALLOCATES,
    _aten.empty_like.default: _Kind.ALLOCATES,
    _aten.lift_fresh.default: _Kind.CONSTANT,
    _aten._local_scalar_dense.default: _Kind.HOST_READ,
    _aten.item.default: _Kind.HOST_READ,
    _aten.nonzero.default: _Kind.HOST_READ,
    _aten.masked_select.default: _Kind.HOST_READ,
    _aten.equal.default: _Kind.HOST_READ,
    _aten.is_nonzero.default: _Kind.HOST_READ,
}


class HostReadDuringCapture(RuntimeError):
    """Code under capture reads a value on the host."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} reads device data while a graph is being captured")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, nodes: list[tuple[Any, Callable[[], None]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes = nodes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip what does not run here would take time in each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kinds.get(func) or _kind_of(func)
        if kind is _Kind.PURE:
            return self._record(func, args, kwargs)
        if kind is _Kind.WRITES:
            self.nodes.append((func, lambda: func(*args, **kwargs)))
            return _written_arguments(func, args, kwargs)
        if kind is _Kind.HOST_READ:
            raise HostReadDuringCapture(str(func))
        result = func(*args, **kwargs)
        return _poison(_tensors(result), result) if kind is _Kind.ALLOCATES else result

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation without side effects now for shapes and types, return poison, and
        compute at replay."""
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        # Views compute nothing. Whether `to` or `reshape` is a view depends on its arguments.
        read = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        if all([tensor.untyped_storage().data_ptr() in read for tensor in outputs]):
            return result

        def compute() -> None:
            fresh = func(*args, **kwargs)
            if isinstance(fresh, Tensor):
                outputs[0].copy_(fresh)
                return
            for output, value in zip(outputs, _tensors(fresh), strict=True):
                output.copy_(value)

        self.nodes.append((func, compute))
        return _poison(outputs, result)


def _kind_of(func: Any) -> _Kind:
    kind = _Kind.WRITES if func._schema.is_mutable else _Kind.PURE
    return _kinds.setdefault(func, kind)


def _tensors(values: object) -> list[Tensor]:
    """All tensors in an operation's arguments or results. (torch's own tree walk is much
    slower.)"""
    found: list[Tensor] = []
    _add_tensors((values,), found)
    return found


def _add_tensors(values: Iterable[object], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _add_tensors(value, found)
        elif isinstance(value, dict):
            _add_tensors(value.values(), found)


def _poison(tensors: list[Tensor], result: Any) -> Any:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.zero_()  # an integer may be used as an index, so it must be in range
    return result


def _written_arguments(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an in-place or out= operation: the arguments that it writes."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(kwargs.get(argument.name, args[index] if index < len(args) else None))
    returns = len(func._schema.returns)
    if returns == 0:
        return None
    return written[0] if returns == 1 else tuple(written[:returns])


class RecordedGraph:
    """Recorded operations in order; `node_names` lists them."""

    def __init__(self) -> None:
        self._nodes: list[tuple[Any, Callable[[], None]]] = []
        self._recorder = _Recorder(self._nodes)
        self._inference = torch.is_inference_mode_enabled()

    @property
    def node_names(self) -> list[str]:
        """Names of the recorded operations."""
        return [str(operation) for operation, _ in self._nodes]

    def replay(self) -> None:
        with torch.inference_mode(self._inference), torch.no_grad():
            for _, node in self._nodes:
                node()

    def reset(self) -> None:
        self._nodes.clear()


class RecordedGraphs:
    """A `GraphBackend` for the CPU; `graphs` keeps every graph that it recorded."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.pools_of_graphs: list[int] = []
        self._num_pools = 0

    def create_pool(self) -> int:
        self._num_pools += 1
        return self._num_pools

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def begin(self, pool: Any) -> RecordedGraph:
        graph = RecordedGraph()
        self.graphs.append(graph)
        self.pools_of_graphs.append(pool)
        graph._recorder.__enter__()  # type: ignore[no-untyped-call]
        return graph

    def end(self, graph: Graph) -> None:
        assert isinstance(graph, RecordedGraph)
        graph._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor  # recorded operations keep their tensors alive anyway

    def synchronize(self) -> None:
        """Nothing to do: the CPU runs operations at once."""

    def memory_used(self) -> int:
        return 0

    def release_unused(self) -> None:
        """Nothing to do: the CPU caches no memory."""
